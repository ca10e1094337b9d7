"""Data files of a split are found in the layouts that datasets come in, and other files are ignored."""

from pathlib import Path

import datasets
import pytest

from tunekit.data.readers.open_dataset import find_data_files, open_dataset
from tunekit.data.readers.row_reader import require_row
from tunekit.errors import UserError

ROWS = [{"text": "a"}, {"text": "b"}, {"text": "c"}]


def write_files(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text('{"text": "a"}\n')


@pytest.mark.parametrize(
    ("files", "split", "expected"),
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
def test_files_of_a_split(files: str, split: str, expected: str, tmp_path: Path) -> None:
    write_files(tmp_path, *files.split())
    names = [str(path.relative_to(tmp_path)) for path in find_data_files(str(tmp_path), split) or ()]
    assert len(names) == len(expected.split())
    assert all(Path(name).match(pattern) for name, pattern in zip(names, expected.split(), strict=True))


@pytest.mark.parametrize(
    ("files", "split", "pattern"),
    [
        ("train.jsonl test.csv", "dev", "'dev'.* test, train"),
        ("a.jsonl", "test", "'test'.* train"),
        ("train/a.jsonl", "test", "'test'.* train"),
        ("notes.txt", "train", r"\.json, \.jsonl, \.csv, \.parquet, \.arrow"),
        ("main/a.jsonl socratic/a.jsonl", "train", "main, socratic"),
        ("a/x b/x c/x d/x e/x f/x g/x", "train", "a, b, c, d, e and 2 more"),
        ("train/notes.txt", "train", r"train: .*\.json, "),
    ],
)
def test_missing_split_error_lists_what_exists(files: str, split: str, pattern: str, tmp_path: Path) -> None:
    write_files(tmp_path, *files.split())
    with pytest.raises(UserError, match=pattern):
        find_data_files(str(tmp_path), split)


def test_saved_datasets_are_read(tmp_path: Path) -> None:
    mixed = [{"text": "a", "tools": [{"name": "f", "n": 1}]}, {"text": "b", "tools": [{"name": 2}]}]
    rows = {"train": mixed * 50, "test": mixed}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(expected, on_mixed_types="use_json") for name, expected in rows.items()}
    )
    saved.save_to_disk(str(tmp_path / "both"), num_shards={"train": 3, "test": 1})
    for name, expected in rows.items():
        for directory, split in ((tmp_path / "both", name), (tmp_path / "both" / name, "train")):
            table = open_dataset(str(directory), split)
            assert table.count == len(expected)
            assert [require_row(row).fields for row in table.rows] == expected
    # Later processing of the dataset leaves cache files next to it, which are no data files.
    datasets.load_from_disk(str(tmp_path / "both" / "test")).map(lambda row: {"text": "changed"})
    assert any(path.name.startswith("cache-") for path in (tmp_path / "both" / "test").iterdir())
    assert open_dataset(str(tmp_path / "both"), "test").count == 2


def test_glob_pattern_finds_matching_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, "b/train.jsonl", "a/test.jsonl", "a/deep/x.jsonl", "a/notes.txt", "[odd].jsonl")
    monkeypatch.chdir(tmp_path)
    for pattern, expected in {
        "*/*": ["a/test.jsonl", "b/train.jsonl"],
        "**/*.jsonl": ["[odd].jsonl", "a/deep/x.jsonl", "a/test.jsonl", "b/train.jsonl"],
        f"{tmp_path}/?/t*.jsonl": [f"{tmp_path}/a/test.jsonl", f"{tmp_path}/b/train.jsonl"],
        "[odd].jsonl": ["[odd].jsonl"],
        f"file://{tmp_path}/b/train.jsonl": [f"{tmp_path}/b/train.jsonl"],
    }.items():
        assert find_data_files(pattern, "train") == [Path(path) for path in expected]
    for pattern, split, message in (
        ("*.csv", "train", r"\*\.csv: .*\.json, "),
        ("a/*.txt", "train", r"a/\*\.txt: "),
        ("*/*", "test", "'train'"),
    ):
        with pytest.raises(UserError, match=message):
            find_data_files(pattern, split)


def test_name_with_file_suffix_is_no_hub_dataset() -> None:
    for name in ("rows.jsonl.gz", "data/rows.arrow", "rows.csv"):
        with pytest.raises(UserError, match=f"^{name}: "):
            find_data_files(name, "train")
    for name in ("owner/name", "owner/name:main", "owner/name@v1.0", "owner/name:main@refs/pr/1", "name"):
        assert find_data_files(name, "train") is None
