"""Rows of every file format and slice are read, and unreadable files and rows are reported with their location."""

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


def write_rows(directory: Path, kind: str, name: str = "rows") -> Path:
    path = directory / f"{name}.{kind}"
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
def test_every_format_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, kind)
    table = open_dataset(str(path), "train")
    assert table.count == 10
    rows = list(table.rows)
    assert [row.fields for row in rows] == ROWS
    assert all(row.where.startswith(str(path)) for row in rows)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_row_names_its_first_line(kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, kind)
    lines = path.read_text("utf-8").split("\n")
    for row in open_dataset(str(path), "train").rows:
        file_name, line = row.where.rsplit(":", 1)
        assert file_name == str(path)
        assert row.fields["text"].split(",")[0] in lines[int(line) - 1]


def test_blank_lines_json_lines_and_nested_lists_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "lines.json"
    lines.write_text('\n{"text": "a"}\n\n{"text": "b"}\n')
    assert [row.where for row in open_dataset(str(lines), "train").rows] == [f"{lines}:2", f"{lines}:4"]
    nested = tmp_path / "under.json"
    nested.write_text(json.dumps({"version": 1, "data": ROWS}))
    assert [row.fields for row in open_dataset(str(nested), "train").rows] == ROWS


@pytest.mark.parametrize(
    "split",
    ["train", "train[:3]", "train[3:]", "train[2:5]", "train[-2:]", "train[:-2]", "train[:25%]", "train[-15%:]"],
)
def test_slices_equal_those_of_datasets(split: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl")
    cache = str(tmp_path / "cache")
    expected = datasets.load_dataset("json", data_files=str(path), split=split, cache_dir=cache)
    table = open_dataset(str(path), split)
    assert [row.fields for row in table.rows] == list(expected)
    assert table.count == len(expected)
    assert open_dataset(str(path), split, limit=1).count == 1


@pytest.mark.parametrize(
    "text", ["", "train[", "train[1]", "train[a:b]", "train[:101%]", "train[::2]", "a+b", "train [:1]"]
)
def test_invalid_split_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_split(text)


def test_directory_with_and_without_splits(tmp_path: Path) -> None:
    write_rows(tmp_path, "jsonl", "train-00000-of-00002")
    write_rows(tmp_path, "parquet", "train-00001-of-00002")
    write_rows(tmp_path, "csv", "test")
    (tmp_path / "README.md").write_text("no rows")
    assert open_dataset(str(tmp_path), "train").count == 20
    assert [row.fields for row in open_dataset(str(tmp_path), "train[9:11]").rows] == [ROWS[9], ROWS[0]]
    assert open_dataset(str(tmp_path), "test").count == 10
    with pytest.raises(UserError, match="'validation'.* test, train"):
        open_dataset(str(tmp_path), "validation")
    without_splits = tmp_path / "plain"
    without_splits.mkdir()
    for name in ("a", "b"):
        write_rows(without_splits, "jsonl", name)
    assert open_dataset(str(without_splits), "train").count == 20
    with pytest.raises(UserError, match="'test'.* train"):
        open_dataset(str(without_splits), "test")


def test_bundled_name_opens_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, "jsonl", "test")
    monkeypatch.setitem(assets.DATA, "tunekit/tools", tmp_path)
    assert open_dataset("tunekit/tools", "test[:50%]").count == 5


def test_hub_name_is_loaded_by_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(path: str, part: str | None, split: str, revision: str | None) -> datasets.Dataset:
        calls.append((path, part, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    table = open_dataset("owner/name:main", "train[-1:]")
    assert [(row.where, row.fields) for row in table.rows] == [("owner/name:main train row 10", ROWS[9])]
    assert open_dataset("name@v1/b", "test").count == 10
    assert calls == [("owner/name", "main", "train", None), ("name", None, "test", "v1/b")]


def test_unreachable_hub_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, part: str | None, split: str, revision: str | None) -> datasets.Dataset:
        raise ConnectionError(f"Couldn't reach\n'{path}' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match="^owner/name: .*'train'.*Couldn't reach 'owner/name'"):
        open_dataset("owner/name", "train")


def test_slow_packages_are_not_imported_for_plain_files() -> None:
    code = "import sys, tunekit.data.readers.open_dataset; print({'datasets', 'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a.jsonl:2: .*Expecting value at column"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', r"a.jsonl:3: .*list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"a.jsonl:2: .*UTF-8 \(byte 0xff at 7\)"),
        ("a.jsonl", b'{"a": ' + b"[" * 200_000 + b"\n", r"a.jsonl:1: .*maximum recursion"),
        ("a.json", b'{"a": ' + b"1" * 10_000 + b"}\n", r"a.json: .*Exceeds the limit"),
        ("a.jsonl", b"\n \n", r"a.jsonl: .*empty"),
        ("a.json", b"[]", r"a.json: .*empty"),
        ("a.json", b'[{"a": 1},\n {"a" 2}]', r"a.json:2: .*':' delimiter at column 7"),
        ("a.json", b"[{}, 3]", r"a.json row 2: .*number"),
        ("a.json", b"3", r"a.json: .*number"),
        ("a.json", b'{"data": [{"a": "\xe9"}]}', r"a.json: .*UTF-8 \(byte 0xe9 at 17\)"),
        ("a.json", b"[" * 200_000, r"a.json:1: .*maximum recursion"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a.csv:3: .*2 columns.* 3"),
        ("a.csv", b"a,b\n1\n", r"a.csv:2: .*2 columns.* 1"),
        ("a.csv", b'a,b\n1,"2\n', r"a.csv:2: .*unexpected end of data"),
        ("a.csv", b"a,b\n1,\xff\n", r"a.csv:\d: .*UTF-8"),
        ("a.parquet", b"PAR1", r"a.parquet: .*Parquet"),
        ("a.txt", b"hello", r"a.txt: .*\.json, \.jsonl, \.csv, \.parquet, \.arrow"),
    ],
)
def test_unreadable_file_is_reported_with_its_location(name, content, pattern, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=pattern) as error:
        list(map(require_row, open_dataset(str(tmp_path / name), "train").rows))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "split", "pattern"),
    [
        ("missing.jsonl", "train", "missing.jsonl: "),
        ("./missing folder", "train", "missing folder: "),
        ("./missing", "train", "^./missing: "),
        ("a/b/c", "train", "a/b/c: "),
        ("{root}", "train", r"\.json, \.jsonl, \.csv, \.parquet, \.arrow"),
        ("{root}/sub/rows.jsonl", "test", "'train'.*'test'"),
        ("{root}/sub/rows.jsonl", "train[10:]", r"train\[10:\].* 10"),
        ("{root}/sub/rows.jsonl", "train[5:5]", r"train\[5:5\].* 10"),
    ],
)
def test_missing_source_is_an_error(source: str, split: str, pattern: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_rows(tmp_path / "sub", "jsonl")
    with pytest.raises(UserError, match=pattern):
        open_dataset(source.format(root=tmp_path), split)


def test_empty_files_are_an_error(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"train\[:5\].* 2 files"):
        open_dataset(str(tmp_path), "train[:5]")


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_permission_error_is_reported(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object, *rest: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / f"rows.{kind}"
    path.write_bytes(b"{}")
    monkeypatch.setattr("tunekit.data.readers.filesystem.io.FileIO", refused)
    monkeypatch.setattr("pyarrow.memory_map", refused)
    with pytest.raises(UserError, match=f"^{path}: .*Permission denied") as error:
        open_dataset(str(path), "train")
    assert str(error.value).count(str(path)) == 1
