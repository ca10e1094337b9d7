"""The fingerprint of preprocessed rows changes with everything that affects them, and with nothing else."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tunekit import assets
from tunekit.config.user_code import load_user_choices
from tunekit.data.datasets import ChatDataset, DatasetConfig, TextDataset
from tunekit.data.preprocess import fingerprint as keys
from tunekit.data.preprocess import preprocess
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import RenameColumns
from tunekit.recipes.sft import SFTConfig

TRANSFORM = """from dataclasses import dataclass

import {helper}
from tunekit.data.transforms import RowTransform


@dataclass(frozen=True)
class Step(RowTransform):
    word: str = "a"

    def __call__(self, fields):
        return fields | {helper}.MORE
"""


def compute_fingerprint(dataset: DatasetConfig, tokenizer: Tokenizer) -> str | None:
    return keys.fingerprint(
        dataset, dataset.prepare_tokenizer(tokenizer), open_dataset(dataset.source, dataset.split, dataset.max_samples)
    )


def write_answers(path: Path, answers: list[str]) -> str:
    rows = ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}] for answer in answers)
    path.write_text("".join(json.dumps({"messages": row, "text": "Hi"}) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> ChatDataset:
    return ChatDataset(source=write_answers(tmp_path / "rows.jsonl", ["one", "two", "three"]))


@pytest.fixture
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 100},
        {"train_on": "last"},
        {"excess_length_strategy": "drop"},
        {"split": "train[1:]"},
        {"max_samples": 2},
    ]
    + [{"transforms": (RenameColumns({"text": "more"}),)}, {"columns": {"messages": "text"}}],
    ids=str,
)
def test_option_that_changes_documents_changes_fingerprint(
    rows: ChatDataset, tokenizer: Tokenizer, change: dict[str, Any]
) -> None:
    assert compute_fingerprint(replace(rows, **change), tokenizer) != compute_fingerprint(rows, tokenizer)


@pytest.mark.parametrize(
    "change",
    [
        {"shuffle": False},
        {"packing": True},
        {"num_proc": 3},
        {"on_bad_row": "skip"},
        {"max_bad_row_fraction": 0.5},
        {"split": "train[:]"},
    ],
    ids=str,
)
def test_other_options_keep_fingerprint(rows: ChatDataset, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    assert compute_fingerprint(replace(rows, **change), tokenizer) == compute_fingerprint(rows, tokenizer)


def test_rows_and_source_change_fingerprint(rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path) -> None:
    before = compute_fingerprint(rows, tokenizer)
    write_answers(tmp_path / "rows.jsonl", ["one", "two", "threE"])
    assert compute_fingerprint(rows, tokenizer) != before
    write_answers(tmp_path / "rows.jsonl", ["one", "two", "three"])
    assert compute_fingerprint(rows, tokenizer) == before
    assert (
        compute_fingerprint(
            replace(rows, source=write_answers(tmp_path / "other.jsonl", ["one", "two", "three"])), tokenizer
        )
        != before
    )


def test_directory_of_a_bundled_dataset_changes_fingerprint(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents store its files, which differ between two installations."""
    dataset = ChatDataset(source="tunekit/tools")
    first = compute_fingerprint(dataset, tokenizer)
    monkeypatch.setitem(assets.DATA, "tunekit/tools", shutil.copytree(assets.DATA["tunekit/tools"], tmp_path / "tools"))
    assert compute_fingerprint(dataset, tokenizer) != first


def test_dataset_class_changes_fingerprint(rows: ChatDataset, tokenizer: Tokenizer) -> None:
    fingerprints = {
        compute_fingerprint(dataset_class(source=rows.source), tokenizer)
        for dataset_class in (ChatDataset, AutoDataset, TextDataset)
    }
    assert len(fingerprints) == 3


def test_tokenizer_and_template_change_fingerprint(
    rows: ChatDataset, tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    tokenizers = {name: Tokenizer.open(directory) for name, directory in tokenizer_dirs.items()}
    assert len({compute_fingerprint(rows, tokenizer) for tokenizer in tokenizers.values()}) == len(tokenizers)
    path, text = tmp_path / "own.jinja", tokenizers["chatml"].templates["default"][0]
    path.write_text(text)
    dataset, without_file = replace(rows, chat_template=str(path)), compute_fingerprint(rows, tokenizers["chatml"])
    same_text = compute_fingerprint(dataset, tokenizers["chatml"])
    path.write_text(text + " ")
    assert len({same_text, without_file, compute_fingerprint(dataset, tokenizers["chatml"])}) == 3


def test_date_changes_fingerprint_only_if_the_template_prints_it(
    rows: ChatDataset, tokenizer_dirs: dict[str, Path]
) -> None:
    days = date(2026, 1, 1), date(2026, 1, 2)
    for name, count in {"chatml": 1, "headers": 2}.items():
        tokenizer = Tokenizer.open(tokenizer_dirs[name])
        assert len({compute_fingerprint(rows, tokenizer.with_date(day)) for day in days}) == count, name


def test_user_code_changes_fingerprint(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "tunekit_test_helper.py"
    helper.write_text("MORE = {}\n")
    (tmp_path / "step.py").write_text(TRANSFORM.format(helper=helper.stem))
    transform = load_user_choices(SFTConfig, [tmp_path / "step.py"]).user_classes[0]
    dataset, other_option = replace(rows, transforms=(transform(),)), replace(rows, transforms=(transform("b"),))
    before = compute_fingerprint(dataset, tokenizer)
    assert len({before, compute_fingerprint(other_option, tokenizer), compute_fingerprint(rows, tokenizer)}) == 3
    helper.write_text("MORE = {'x': 1}\n")  # a file that the user's file imports
    changed = compute_fingerprint(dataset, tokenizer)
    assert changed != before
    with (tmp_path / "step.py").open("a") as file:
        file.write("# more\n")
    assert compute_fingerprint(dataset, tokenizer) not in (before, changed)


def test_text_imported_by_user_code_changes_fingerprint(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = tmp_path / "tunekit_test_texts.py"
    texts.write_text("MORE = 'a'\n")
    (tmp_path / "step.py").write_text(
        TRANSFORM.replace("import {helper}", "from tunekit_test_texts import MORE").replace("{helper}.MORE", "{}")
    )
    transform = load_user_choices(SFTConfig, [tmp_path / "step.py"]).user_classes[0]
    before = compute_fingerprint(replace(rows, transforms=(transform(),)), tokenizer)
    texts.write_text("MORE = 'b'\n")
    assert compute_fingerprint(replace(rows, transforms=(transform(),)), tokenizer) != before


def test_code_of_an_installed_transform_changes_fingerprint(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_packages = tmp_path / "site-packages"
    site_packages.mkdir()
    monkeypatch.syspath_prepend(str(site_packages))
    path = site_packages / "tunekit_test_installed.py"
    path.write_text(TRANSFORM.replace("import {helper}", "import json").replace("{helper}.MORE", "{}"))
    transform = importlib.import_module(path.stem).Step
    before = compute_fingerprint(replace(rows, transforms=(transform(),)), tokenizer)
    path.write_text(path.read_text() + "# more\n")
    assert compute_fingerprint(replace(rows, transforms=(transform(),)), tokenizer) != before


def test_notebook_class_has_no_fingerprint(rows: ChatDataset, tokenizer: Tokenizer, monkeypatch) -> None:
    dataset_class = type("Mine", (ChatDataset,), {"__module__": "__main__"})
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert compute_fingerprint(dataset_class(source=rows.source), tokenizer) is None


def test_tunekit_code_changes_fingerprint(
    rows: ChatDataset, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compute_fingerprint(rows, tokenizer)
    code_hashes = keys.code_hashes()
    stems = {Path(name).stem for name in code_hashes}
    assert {"datasets", "loss_mask", "template", "tokenizer", "messages", "row_reader"} <= stems
    assert not {"build", "packing", "cache", "fingerprint", "report", "row_stats"} & stems
    assert len(code_hashes) == len(list(keys.code_files())) + len(keys.PACKAGES) + 1, "files with one name are distinct"
    for name in ("chat_template/loss_mask.py", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(keys, "code_hashes", lambda name=name: code_hashes | {name: "other"})
            assert compute_fingerprint(rows, tokenizer) != before


FINGERPRINT_SCRIPT = """
import sys
from pathlib import Path
from tunekit.data.preprocess.fingerprint import fingerprint
from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer

rows = ChatDataset(source=sys.argv[1])
tokenizer = rows.prepare_tokenizer(Tokenizer.open(Path(sys.argv[2])))
print(fingerprint(rows, tokenizer, open_dataset(rows.source, rows.split)))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_other_processes_compute_the_same_fingerprint(
    rows: ChatDataset, tokenizer_dirs: dict[str, Path], tokenizer: Tokenizer, seed: str
) -> None:
    command = [sys.executable, "-c", FINGERPRINT_SCRIPT, rows.source, str(tokenizer_dirs["chatml"])]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == compute_fingerprint(rows, tokenizer)


def test_loader_options_do_not_preprocess_again(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, make_dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    first = preprocess.preprocess_dataset(rows, tokenizer, make_dist())
    monkeypatch.setattr(preprocess, "tokenize_chunks", pytest.fail)
    reloaded = preprocess.preprocess_dataset(replace(rows, shuffle=False, packing=True), tokenizer, make_dist(seed=1))
    assert reloaded.fingerprint == first.fingerprint
