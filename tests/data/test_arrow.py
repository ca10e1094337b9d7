"""Columns: what datasets writes is read as it gives it back, and a damaged file ends in rows, faults or a line."""

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sources import columns, small_chunks, write
from tests.data.test_table import resumes
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, Row, require_row
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
def test_nested_values_come_as_they_were(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}", ROWS)
    with small_chunks(4):
        table = open_dataset(str(path), "train")
        rows = [require_row(row) for row in table.rows]
        assert [row.fields for row in rows] == ROWS
        assert [row.where for row in rows] == [f"{path} row {number}" for number in range(1, 51)]
        resumes(table)


def test_texts_that_are_json_are_parsed_as_datasets_does(tmp_path: Path) -> None:
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


def test_a_text_that_is_no_utf8_is_the_fault_of_its_row(tmp_path: Path) -> None:
    raw = pyarrow.array([b"fine", b"\xff", b"too"]).cast(pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet")
    good, bad, more = open_dataset(str(tmp_path / "rows.parquet"), "train").rows
    assert isinstance(good, Row) and isinstance(more, Row)
    assert isinstance(bad, BadRow) and bad.where.endswith("rows.parquet row 2") and "utf-8" in bad.reason


def test_row_groups_of_any_size_are_read_in_small_chunks(tmp_path: Path) -> None:
    rows = [{"text": f"{number}" * 40} for number in range(2000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2000)
    with small_chunks(100, 10_000):
        table = open_dataset(str(tmp_path / "rows.parquet"), "train")
        assert max(chunk.count for chunk in table.chunks()) <= 100
        resumes(table)


@given(data=st.data(), kind=st.sampled_from(["parquet", "arrow", "feather.arrow"]))
@settings(max_examples=80, deadline=None)
def test_a_file_that_was_cut_ends_in_rows_or_a_line(data: Any, kind: str, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("cut") / f"rows.{kind}"
    raw = columns(path.name, ROWS)
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    try:
        found = list(open_dataset(str(path), "train").rows)
    except UserError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return
    # A stream may lack what marks its end.
    assert kind == "arrow" and [require_row(row).fields for row in found] == ROWS[: len(found)]


def test_what_is_no_such_file_is_told(tmp_path: Path) -> None:
    for name, says in {"a.parquet": "not a Parquet file: ", "a.arrow": "not an Arrow file, or a damaged one: "}.items():
        (tmp_path / name).write_text(json.dumps({"text": "x" * 50}))
        with pytest.raises(UserError, match=f"{name}: {says}"):
            open_dataset(str(tmp_path / name), "train")
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UserError, match=f"{name}: {says}|holds no row"):
            open_dataset(str(tmp_path / name), "train")
