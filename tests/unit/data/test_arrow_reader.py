"""Columnar files: rows equal those of `datasets`, and a damaged file gives rows, bad rows, or a one-line error."""

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

from tests.helpers.row_files import encode_columns, small_chunks, write
from tests.unit.data.test_chunks import check_resumes
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


def test_invalid_utf8_is_a_bad_row(tmp_path: Path) -> None:
    values = pyarrow.array([b"fine", b"\xff", b"too"]).cast(pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, values.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet")
    good, bad, last = open_dataset(str(tmp_path / "rows.parquet"), "train").rows
    assert isinstance(good, Row) and isinstance(last, Row)
    assert isinstance(bad, BadRow) and bad.where.endswith("rows.parquet row 2") and "utf-8" in bad.reason


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
