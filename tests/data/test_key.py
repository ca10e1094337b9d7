"""Whatever changes what a row becomes gives another key; nothing else does."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tunekit.config.user_code import load_user_choices
from tunekit.data.datasets import AutoDataset, ChatDataset, DatasetConfig, TextDataset
from tunekit.data.preprocess import fingerprint as keys
from tunekit.data.preprocess import preprocess
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import RenameColumns
from tunekit.recipes.sft import SFTConfig

STEP = """from dataclasses import dataclass

import {helper}
from tunekit.data.transforms import RowTransform


@dataclass(frozen=True)
class Step(RowTransform):
    word: str = "a"

    def __call__(self, fields):
        return fields | {helper}.MORE
"""


def key(rows: DatasetConfig, tokenizer: Tokenizer) -> str | None:
    return keys.fingerprint(rows, rows.prepare(tokenizer), open_dataset(rows.source, rows.split, rows.max_samples))


def write(path: Path, words: list[str]) -> str:
    rows = ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}] for word in words)
    path.write_text("".join(json.dumps({"messages": row, "text": "Hi"}) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> ChatDataset:
    return ChatDataset(source=write(tmp_path / "rows.jsonl", ["one", "two", "three"]))


@pytest.fixture
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 100},
        {"train_on": "last"},
        {"excess_length_strategy": "drop"},
        {"split": "train[1:]"},
        {"max_samples": 2},
    ]
    + [{"transforms": (RenameColumns({"text": "more"}),)}, {"messages_column": "text"}],
    ids=str,
)
def test_what_decides_gives_another_key(rows: ChatDataset, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    assert key(replace(rows, **change), tokenizer) != key(rows, tokenizer)


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
def test_what_does_not_decide_gives_the_same(rows: ChatDataset, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    assert key(replace(rows, **change), tokenizer) == key(rows, tokenizer)


def test_rows_decide(rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path) -> None:
    before = key(rows, tokenizer)
    write(tmp_path / "rows.jsonl", ["one", "two", "threE"])
    assert key(rows, tokenizer) != before
    write(tmp_path / "rows.jsonl", ["one", "two", "three"])
    assert key(rows, tokenizer) == before
    assert key(replace(rows, source=write(tmp_path / "other.jsonl", ["one", "two", "three"])), tokenizer) != before


def test_the_kind_decides(rows: ChatDataset, tokenizer: Tokenizer) -> None:
    found = {key(kind(source=rows.source), tokenizer) for kind in (ChatDataset, AutoDataset, TextDataset)}
    assert len(found) == 3


def test_the_tokenizer_and_its_template_decide(rows: ChatDataset, folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizers = {name: Tokenizer.open(folder) for name, folder in folders.items()}
    assert len({key(rows, tokenizer) for tokenizer in tokenizers.values()}) == len(tokenizers)
    own, text = tmp_path / "own.jinja", tokenizers["chatml"].templates["default"][0]
    own.write_text(text)
    one, other = replace(rows, chat_template=str(own)), key(rows, tokenizers["chatml"])
    same = key(one, tokenizers["chatml"])
    own.write_text(text + " ")
    assert len({same, other, key(one, tokenizers["chatml"])}) == 3


def test_the_day_decides_where_the_template_prints_it(rows: ChatDataset, folders: dict[str, Path]) -> None:
    days = date(2026, 1, 1), date(2026, 1, 2)
    for name, count in {"chatml": 1, "headers": 2}.items():
        tokenizer = Tokenizer.open(folders[name])
        assert len({key(rows, tokenizer.dated(day)) for day in days}) == count, name


def test_own_code_decides(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "tunekit_test_helper.py"
    helper.write_text("MORE = {}\n")
    (tmp_path / "step.py").write_text(STEP.format(helper=helper.stem))
    step = load_user_choices(SFTConfig, [tmp_path / "step.py"]).own[0]
    one, other = replace(rows, transforms=(step(),)), replace(rows, transforms=(step("b"),))
    before = key(one, tokenizer)
    assert len({before, key(other, tokenizer), key(rows, tokenizer)}) == 3
    helper.write_text("MORE = {'x': 1}\n")  # a file that the own file imports
    changed = key(one, tokenizer)
    assert changed != before
    with (tmp_path / "step.py").open("a") as file:
        file.write("# more\n")
    assert key(one, tokenizer) not in (before, changed)


def test_a_text_that_own_code_imports_decides(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = tmp_path / "tunekit_test_texts.py"
    texts.write_text("MORE = 'a'\n")
    (tmp_path / "step.py").write_text(
        STEP.replace("import {helper}", "from tunekit_test_texts import MORE").replace("{helper}.MORE", "{}")
    )
    step = load_user_choices(SFTConfig, [tmp_path / "step.py"]).own[0]
    before = key(replace(rows, transforms=(step(),)), tokenizer)
    texts.write_text("MORE = 'b'\n")
    assert key(replace(rows, transforms=(step(),)), tokenizer) != before


def test_the_code_of_an_installed_step_decides(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    file = folder / "tunekit_test_installed.py"
    file.write_text(STEP.replace("import {helper}", "import json").replace("{helper}.MORE", "{}"))
    step = importlib.import_module(file.stem).Step
    before = key(replace(rows, transforms=(step(),)), tokenizer)
    file.write_text(file.read_text() + "# more\n")
    assert key(replace(rows, transforms=(step(),)), tokenizer) != before


def test_what_a_notebook_defines_is_never_taken_for_known(rows: ChatDataset, tokenizer: Tokenizer, monkeypatch) -> None:
    kind = type("Mine", (ChatDataset,), {"__module__": "__main__"})
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert key(kind(source=rows.source), tokenizer) is None


def test_the_code_of_tunekit_decides(rows: ChatDataset, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(rows, tokenizer)
    known = keys.code()
    stems = {Path(name).stem for name in known}
    assert {"datasets", "loss_mask", "template", "tokenizer", "messages", "row_reader"} <= stems
    assert not {"build", "packing", "cache", "fingerprint", "report", "row_stats"} & stems
    assert len(known) == len(list(keys.sources())) + len(keys.PACKAGES) + 1, "two files of one name are two"
    for name in ("chat_template/loss_mask.py", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(keys, "code", lambda name=name: known | {name: "other"})
            assert key(rows, tokenizer) != before


ELSEWHERE = """
import sys
from pathlib import Path
from tunekit.data.preprocess.fingerprint import fingerprint
from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer

rows = ChatDataset(source=sys.argv[1])
print(fingerprint(rows, rows.prepare(Tokenizer.open(Path(sys.argv[2]))), open_dataset(rows.source, rows.split)))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_other_processes_find_the_same(
    rows: ChatDataset, folders: dict[str, Path], tokenizer: Tokenizer, seed: str
) -> None:
    line = [sys.executable, "-c", ELSEWHERE, rows.source, str(folders["chatml"])]
    done = subprocess.run(line, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == key(rows, tokenizer)


def test_serving_rows_otherwise_prepares_nothing(
    rows: ChatDataset, tokenizer: Tokenizer, tmp_path: Path, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    first = preprocess.preprocess_dataset(rows, tokenizer, place())
    monkeypatch.setattr(preprocess, "tokenize_chunks", pytest.fail)
    again = preprocess.preprocess_dataset(replace(rows, shuffle=False, packing=True), tokenizer, place(seed=1))
    assert again.digest == first.digest
