"""Rows of every kind of file, any part of them, and a line with file and place for what cannot be read."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tunekit import assets
from tunekit.data.readers.open_dataset import open_dataset, parse_split
from tunekit.data.readers.row_reader import require_row
from tunekit.errors import UserError

ROWS = [{"text": f"row {number}, né\n\u2028“{number}”"} for number in range(10)]


def write(folder: Path, kind: str, name: str = "rows") -> Path:
    path = folder / f"{name}.{kind}"
    if kind == "json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, ["text"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    table = open_dataset(str(path), "train")
    assert table.count == 10
    rows = list(table.rows)
    assert [row.fields for row in rows] == ROWS
    assert all(row.where.startswith(str(path)) for row in rows)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_row_names_the_line_where_it_begins(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    lines = path.read_text("utf-8").split("\n")
    for row in open_dataset(str(path), "train").rows:
        file, line = row.where.rsplit(":", 1)
        assert file == str(path)
        assert row.fields["text"].split(",")[0] in lines[int(line) - 1]


def test_blank_lines_and_json_lines_in_a_json_file_and_a_list_under_data_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "lines.json"
    lines.write_text('\n{"text": "a"}\n\n{"text": "b"}\n')
    assert [row.where for row in open_dataset(str(lines), "train").rows] == [f"{lines}:2", f"{lines}:4"]
    under = tmp_path / "under.json"
    under.write_text(json.dumps({"version": 1, "data": ROWS}))
    assert [row.fields for row in open_dataset(str(under), "train").rows] == ROWS


@pytest.mark.parametrize(
    "split",
    ["train", "train[:3]", "train[3:]", "train[2:5]", "train[-2:]", "train[:-2]", "train[:25%]", "train[-15%:]"],
)
def test_slices_are_those_of_datasets(split: str, tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    cache = str(tmp_path / "cache")
    want = datasets.load_dataset("json", data_files=str(path), split=split, cache_dir=cache)
    table = open_dataset(str(path), split)
    assert [row.fields for row in table.rows] == list(want)
    assert table.count == len(want)
    assert open_dataset(str(path), split, limit=1).count == 1


@pytest.mark.parametrize(
    "text", ["", "train[", "train[1]", "train[a:b]", "train[:101%]", "train[::2]", "a+b", "train [:1]"]
)
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no split|more than 100%"):
        parse_split(text)


def test_a_folder_holds_splits_or_one(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", "train-00000-of-00002")
    write(tmp_path, "parquet", "train-00001-of-00002")
    write(tmp_path, "csv", "test")
    (tmp_path / "README.md").write_text("no rows")
    assert open_dataset(str(tmp_path), "train").count == 20
    assert [row.fields for row in open_dataset(str(tmp_path), "train[9:11]").rows] == [ROWS[9], ROWS[0]]
    assert open_dataset(str(tmp_path), "test").count == 10
    with pytest.raises(UserError, match="no split 'validation'; it has test, train"):
        open_dataset(str(tmp_path), "validation")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("a", "b"):
        write(plain, "jsonl", name)
    assert open_dataset(str(plain), "train").count == 20
    with pytest.raises(UserError, match="no split 'test'; it has train"):
        open_dataset(str(plain), "test")


def test_a_bundled_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "jsonl", "test")
    monkeypatch.setitem(assets.DATA, "tunekit/tools", tmp_path)
    assert open_dataset("tunekit/tools", "test[:50%]").count == 5


def test_a_hub_name_goes_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, part: str | None, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((path, part, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    table = open_dataset("owner/name:main", "train[-1:]")
    assert [(row.where, row.fields) for row in table.rows] == [("owner/name:main train row 10", ROWS[9])]
    assert open_dataset("name@v1/b", "test").count == 10
    assert asked == [("owner/name", "main", "train", None), ("name", None, "test", "v1/b")]


def test_a_hub_that_does_not_answer_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, part: str | None, split: str, revision: str | None) -> datasets.Dataset:
        raise ConnectionError(f"Couldn't reach\n'{path}' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        UserError, match="^owner/name: no such file or folder, and no split 'train' from the Hub: Couldn't"
    ):
        open_dataset("owner/name", "train")


def test_what_is_slow_to_import_is_not_imported_for_plain_files() -> None:
    code = "import sys, tunekit.data.readers.open_dataset; print({'datasets', 'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a.jsonl:2: malformed JSON: Expecting value at column"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', r"a.jsonl:3: a row must be a JSON object, this is list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"a.jsonl:2: not UTF-8 \(byte 0xff at 7\)"),
        ("a.jsonl", b'{"a": ' + b"[" * 200_000 + b"\n", r"a.jsonl:1: unreadable JSON: maximum recursion"),
        ("a.jsonl", b'{"a": ' + b"1" * 10_000 + b"}\n", r"a.jsonl:1: unreadable JSON: Exceeds the limit"),
        ("a.jsonl", b"\n \n", r"a.jsonl: train holds no row: the file is empty"),
        ("a.json", b"[]", r"a.json: train holds no row: the file is empty"),
        ("a.json", b'[{"a": 1},\n {"a" 2}]', r"a.json:2: malformed JSON: Expecting ':' delimiter at column 7"),
        ("a.json", b"[{}, 3]", r"a.json row 2: a row must be a JSON object, this is int"),
        ("a.json", b"3", r"a.json: want a list of rows or {\"data\": \[rows\]}, this is int"),
        ("a.json", b'{"data": [{"a": "\xe9"}]}', r"a.json: not UTF-8 \(byte 0xe9 at 17\)"),
        ("a.json", b"[" * 200_000, r"a.json:1: malformed JSON: maximum recursion"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a.csv:3: the header names 2 columns, this row has 3"),
        ("a.csv", b"a,b\n1\n", r"a.csv:2: the header names 2 columns, this row has 1"),
        ("a.csv", b'a,b\n1,"2\n', r"a.csv:2: malformed CSV: unexpected end of data"),
        ("a.csv", b"a,b\n1,\xff\n", r"a.csv:\d: not UTF-8"),
        ("a.parquet", b"PAR1", r"a.parquet: not a Parquet file: "),
        ("a.txt", b"hello", r"a.txt: rows are read from .json, .jsonl, .csv, .parquet, .arrow files, not from .txt"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(name, content, message, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as told:
        list(map(require_row, open_dataset(str(tmp_path / name), "train").rows))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [
        ("gone.jsonl", "train", "gone.jsonl: no such file or folder"),
        ("./gone folder", "train", "gone folder: no such file or folder"),
        ("./gone", "train", "^./gone: no such file or folder$"),
        ("a/b/c", "train", "a/b/c: no such file or folder"),
        ("{here}", "train", r"the folder holds no .json, .jsonl, .csv, .parquet, .arrow file"),
        (
            "{here}/sub/rows.jsonl",
            "test",
            r"a file has only the split 'train', not 'test'",
        ),
        ("{here}/sub/rows.jsonl", "train[10:]", r"train\[10:\] holds no row \(of 10\)"),
        ("{here}/sub/rows.jsonl", "train[5:5]", r"train\[5:5\] holds no row \(of 10\)"),
    ],
)
def test_a_source_that_is_not_there_is_told(source: str, split: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "jsonl")
    with pytest.raises(UserError, match=message):
        open_dataset(source.format(here=tmp_path), split)


def test_a_folder_of_empty_files_is_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"train\[:5\] holds no row: its 2 files are empty"):
        open_dataset(str(tmp_path), "train[:5]")


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_a_file_that_may_not_be_read_is_told(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object, *rest: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / f"rows.{kind}"
    path.write_bytes(b"{}")
    monkeypatch.setattr("tunekit.data.readers.filesystem.io.FileIO", refused)
    monkeypatch.setattr("pyarrow.memory_map", refused)
    with pytest.raises(UserError, match=f"^{path}: .*Permission denied$") as told:
        open_dataset(str(path), "train")
    assert str(told.value).count(str(path)) == 1
