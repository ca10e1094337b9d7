"""Columnar files: rows equal those of `datasets`, and a damaged file gives rows, bad rows, or a one-line error."""

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.row_files import encode_columns, small_chunks, write
from tests.unit.data.test_chunks import check_resumes
from tunekit.data.datasets import TextDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, UnreadableCell, require_row
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Filter, RenameColumns
from tunekit.errors import UserError

ROWS = [
    {
        "messages": [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": None}],
        "number": number,
        "score": number / 7,
        "day": datetime.date(2026, 1, 1 + number % 28),
        "tags": ["a", "b"][: number % 3],
    }
    for number in range(50)
]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather.arrow"])
def test_nested_values_are_read_unchanged(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}", ROWS)
    with small_chunks(4):
        table = open_dataset(str(path), "train")
        rows = [require_row(row) for row in table.rows]
        assert [row.fields for row in rows] == ROWS
        assert [row.where for row in rows] == [f"{path} row {number}" for number in range(1, 51)]
        check_resumes(table)


def test_json_texts_are_parsed_like_datasets(tmp_path: Path) -> None:
    rows = [
        {"plain": "1", "tools": [{"a": 1}, {"a": "x", "b": [None]}], "one": {"in": [1, "2"]}},
        {"plain": "{}", "tools": None, "one": 7},
    ]
    saved = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    saved.to_parquet(tmp_path / "rows.parquet")
    assert [require_row(row).fields for row in open_dataset(str(tmp_path / "rows.parquet"), "train").rows] == list(
        saved
    )
    assert list(saved)[0]["tools"] == rows[0]["tools"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_invalid_utf8_is_a_bad_row(kind: str, tmp_path: Path, nano: Tokenizer) -> None:
    values = pyarrow.array([b"fine", b"\xff", b"too"]).cast(pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, values.buffers())
    path = write_table(tmp_path / f"rows.{kind}", pyarrow.table({"text": texts}))
    rows = open_dataset(str(path), "train").rows
    good, bad, last = TextDataset("x").encode_rows(nano, rows)
    assert isinstance(good, list) and isinstance(last, list)
    assert isinstance(bad, BadRow) and bad.where == f"{path} row 2" and "utf-8" in bad.reason


UNREADABLE = {  # values that Python cannot represent
    "zone": pyarrow.array([253402300799999999], pyarrow.timestamp("us", "Asia/Tokyo")),  # 9999-12-31 in UTC
    "unknown_zone": pyarrow.array([0], pyarrow.timestamp("us", "No/Zone")),
    "date": pyarrow.array([2**31 - 1], pyarrow.date32()),
    "duration": pyarrow.array([2**62], pyarrow.duration("s")),
    "fields": pyarrow.StructArray.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"]),
}
READABLE = {
    "number": pyarrow.array([10**70], pyarrow.decimal256(76, 0)),
    "id": pyarrow.array([b"1" * 16], pyarrow.uuid()),
    "bytes": pyarrow.array([b"\xff"]),
    "pairs": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather.arrow"])
def test_columns_without_a_python_type_fail_only_if_used(kind: str, tmp_path: Path, nano: Tokenizer) -> None:
    unreadable = {name: values for name, values in UNREADABLE.items() if kind != "parquet" or name != "fields"}
    table = pyarrow.table({**unreadable, "text": pyarrow.array(["Hello!"]), **READABLE})
    path = write_table(tmp_path / f"rows.{kind}", table)
    (row,) = map(require_row, open_dataset(str(path), "train").rows)
    assert [*row.fields] == table.column_names, "the names of unread columns are known"
    for name in table.column_names:
        dataset = TextDataset("x", columns={"text": name}, transforms=(Filter({"text": "Hello!"}),))
        (result,) = dataset.encode_rows(nano, [row])
        assert isinstance(result, list) == (name == "text")
        assert isinstance(result, list) or (isinstance(result, BadRow) and name in result.reason)
    for name in unreadable:
        for transform in (Filter({name: 1}), RenameColumns({name: "text"})):
            (result,) = TextDataset("x", transforms=(transform,)).encode_rows(nano, [row])
            assert isinstance(result, BadRow) and repr(name) in result.reason


def test_columns_of_the_same_name_fail_only_if_used(tmp_path: Path) -> None:
    texts = pyarrow.array(["a"])
    path = write_table(tmp_path / "rows.arrow", pyarrow.Table.from_arrays([texts] * 3, names=["text", "b", "b"]))
    (row,) = map(require_row, open_dataset(str(path), "train").rows)
    assert row.fields["text"] == "a" and isinstance(row.fields["b"], UnreadableCell)


def test_dictionaries_and_views_are_read(tmp_path: Path) -> None:
    values = ["a", None, "b", "a"]
    columns = {
        "codes": pyarrow.array(values).dictionary_encode(),
        "views": pyarrow.array(values, pyarrow.string_view()),
        "runs": pyarrow.RunEndEncodedArray.from_arrays([1, 2, 3, 4], pyarrow.array(values)),
    }
    path = write_table(tmp_path / "rows.arrow", pyarrow.table(columns))
    rows = [require_row(row).fields for row in open_dataset(str(path), "train").rows]
    assert rows == [dict.fromkeys(columns, value) for value in values]


def test_offsets_outside_of_a_buffer_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    offsets = pyarrow.py_buffer(np.array([0, 2**30, 4], np.int32))
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"abcd")])
    with pyarrow.ipc.new_stream(str(path), pyarrow.schema([("text", pyarrow.string())])) as stream:
        stream.write_batch(pyarrow.record_batch([broken], names=["text"]))
    with pytest.raises(UserError, match=f"^{path}: "):
        list(open_dataset(str(path), "train").rows)


def write_table(path: Path, table: pyarrow.Table) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.name.endswith("feather.arrow"):
        pyarrow.feather.write_feather(table, str(path))
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


def test_row_groups_are_read_in_small_chunks(tmp_path: Path) -> None:
    rows = [{"text": f"{number}" * 40} for number in range(2000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2000)
    with small_chunks(100, 10_000):
        table = open_dataset(str(tmp_path / "rows.parquet"), "train")
        assert max(chunk.count for chunk in table.chunks()) <= 100
        check_resumes(table)


@given(data=st.data(), kind=st.sampled_from(["parquet", "arrow", "feather.arrow"]))
@settings(max_examples=80, deadline=None)
def test_truncated_file_gives_rows_or_a_one_line_error(data: Any, kind: str, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("cut") / f"rows.{kind}"
    raw = encode_columns(path.name, ROWS)
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    try:
        rows = list(open_dataset(str(path), "train").rows)
    except UserError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return
    # A stream can lack its end marker.
    assert kind == "arrow" and [require_row(row).fields for row in rows] == ROWS[: len(rows)]


def test_invalid_file_is_rejected_with_its_format(tmp_path: Path) -> None:
    for name, file_format in {"a.parquet": "Parquet", "a.arrow": "Arrow"}.items():
        (tmp_path / name).write_text(json.dumps({"text": "x" * 50}))
        with pytest.raises(UserError, match=f"{name}: .*{file_format}"):
            open_dataset(str(tmp_path / name), "train")
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UserError, match=f"{name}: "):
            open_dataset(str(tmp_path / name), "train")
