"""Which files of a folder are read: those of the split, in every layout that data sets come in, and no others."""

from pathlib import Path

import datasets
import pytest

from tunekit.data.readers.open_dataset import find_data_files, open_dataset
from tunekit.data.readers.row_reader import require_row
from tunekit.errors import UserError

ROWS = [{"text": "a"}, {"text": "b"}, {"text": "c"}]


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')


@pytest.mark.parametrize(
    ("files", "split", "wanted"),
    [
        ("train.jsonl test.jsonl", "train", "train.jsonl"),
        ("train.jsonl.gz valid.csv", "valid", "valid.csv"),
        ("train-00000-of-00002.json train-00001-of-00002.json test-0.json", "train", "train-0* train-00001*"),
        ("train_a.jsonl train.b.jsonl test.jsonl", "train", "train.b.jsonl train_a.jsonl"),
        ("trains.jsonl train.jsonl", "train", "train.jsonl"),
        ("b.jsonl a.csv notes.txt", "train", "a.csv b.jsonl"),
        ("mine.jsonl other.jsonl", "mine", "mine.jsonl"),
        ("train/b.jsonl train/a.jsonl test/a.jsonl", "train", "train/a.jsonl train/b.jsonl"),
        ("data/train-0.jsonl data/test-0.jsonl README.md", "test", "data/test-0.jsonl"),
        ("data/train/0.jsonl data/test/0.jsonl", "train", "data/train/0.jsonl"),
        ("train.jsonl .hidden.jsonl state.json dataset_info.json cache-12.arrow", "train", "train.jsonl"),
    ],
)
def test_files_of_a_split(files: str, split: str, wanted: str, tmp_path: Path) -> None:
    lay(tmp_path, *files.split())
    names = [str(path.relative_to(tmp_path)) for path in find_data_files(str(tmp_path), split) or ()]
    assert len(names) == len(wanted.split())
    assert all(Path(name).match(pattern) for name, pattern in zip(names, wanted.split(), strict=True))


@pytest.mark.parametrize(
    ("files", "split", "says"),
    [
        ("train.jsonl test.csv", "dev", "no split 'dev'; it has test, train"),
        ("a.jsonl", "test", "no split 'test'; it has train"),
        ("train/a.jsonl", "test", "no split 'test'; it has train"),
        ("notes.txt", "train", r"the folder holds no .json, .jsonl, .csv, .parquet, .arrow file$"),
        ("main/a.jsonl socratic/a.jsonl", "train", r"file; name one of the folders in it: main, socratic$"),
        ("a/x b/x c/x d/x e/x f/x g/x", "train", r"name one of the folders in it: a, b, c, d, e and 2 more$"),
        ("train/notes.txt", "train", r"train: the folder holds no .json, .*file$"),
    ],
)
def test_a_folder_without_the_split_says_what_it_has(files: str, split: str, says: str, tmp_path: Path) -> None:
    lay(tmp_path, *files.split())
    with pytest.raises(UserError, match=says):
        find_data_files(str(tmp_path), split)


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    mixed = [{"text": "a", "tools": [{"name": "f", "n": 1}]}, {"text": "b", "tools": [{"name": 2}]}]
    rows = {"train": mixed * 50, "test": mixed}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(held, on_mixed_types="use_json") for name, held in rows.items()}
    )
    saved.save_to_disk(str(tmp_path / "both"), num_shards={"train": 3, "test": 1})
    for name, held in rows.items():
        for folder, split in ((tmp_path / "both", name), (tmp_path / "both" / name, "train")):
            table = open_dataset(str(folder), split)
            assert table.count == len(held)
            assert [require_row(row).fields for row in table.rows] == held
    # Later work on the set leaves files beside it, which are not of it.
    datasets.load_from_disk(str(tmp_path / "both" / "test")).map(lambda row: {"text": "changed"})
    assert any(path.name.startswith("cache-") for path in (tmp_path / "both" / "test").iterdir())
    assert open_dataset(str(tmp_path / "both"), "test").count == 2


def test_a_pattern_takes_what_it_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, "b/train.jsonl", "a/test.jsonl", "a/deep/x.jsonl", "a/notes.txt", "[odd].jsonl")
    monkeypatch.chdir(tmp_path)
    for pattern, wanted in {
        "*/*": ["a/test.jsonl", "b/train.jsonl"],
        "**/*.jsonl": ["[odd].jsonl", "a/deep/x.jsonl", "a/test.jsonl", "b/train.jsonl"],
        f"{tmp_path}/?/t*.jsonl": [f"{tmp_path}/a/test.jsonl", f"{tmp_path}/b/train.jsonl"],
        "[odd].jsonl": ["[odd].jsonl"],
        f"file://{tmp_path}/b/train.jsonl": [f"{tmp_path}/b/train.jsonl"],
    }.items():
        assert find_data_files(pattern, "train") == [Path(path) for path in wanted]
    for pattern, split, says in (
        ("*.csv", "train", r"\*.csv: matches no .json, "),
        ("a/*.txt", "train", "matches no"),
        ("*/*", "test", "has only the split 'train'"),
    ):
        with pytest.raises(UserError, match=says):
            find_data_files(pattern, split)


def test_a_name_with_the_end_of_a_file_is_no_name_of_the_hub() -> None:
    for name in ("rows.jsonl.gz", "data/rows.arrow", "rows.csv"):
        with pytest.raises(UserError, match=f"^{name}: no such file or folder$"):
            find_data_files(name, "train")
    for name in ("owner/name", "owner/name:main", "owner/name@v1.0", "owner/name:main@refs/pr/1", "name"):
        assert find_data_files(name, "train") is None
