"""CSV in every kind of damage: rows are those that the standard library finds, faults have a line."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sources import small_chunks
from tests.data.test_table import resumes
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, require_row
from tunekit.errors import UserError

# A lone carriage return is left out: csv.writer writes it without quotes, and then it ends a line.
CELLS = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=8)
CELLS |= st.sampled_from(["", '"', '""', "a,b", "a\nb", "a\r\nb", "né", "x" * 200])


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_was_written_is_read_again(rows, end, mark, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rows.csv"
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator=end)
    writer.writerow(["a", "b"])
    starts = []
    for row in rows:
        starts.append(out.getvalue().count("\n") + 1)
        writer.writerow(row)
    path.write_bytes(out.getvalue().encode("utf-8-sig" if mark else "utf-8"))
    with small_chunks(3, 40):
        table = open_dataset(str(path), "train")
        found = [require_row(row) for row in table.rows]
        resumes(table)
    assert [tuple(row.fields.values()) for row in found] == rows
    assert [row.where for row in found] == [f"{path}:{start}" for start in starts]


@given(
    pieces=st.lists(
        st.sampled_from(
            [b"a", b",", b'"', b'""', b"\n", b"\r\n", b"\r", b"\xff", b"\0", b"\xef\xbb\xbf", "né".encode()]
        )
    )
)
@settings(max_examples=250, deadline=None)
def test_whatever_a_file_holds_it_ends_in_rows_or_a_line(pieces: list[bytes], tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rows.csv"
    path.write_bytes(b"a,b\n1,2\n" + b"".join(pieces))
    with small_chunks(2, 10):
        try:
            table = open_dataset(str(path), "train")
            rows = list(table.rows)
        except UserError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            return
        resumes(table)
    lines = path.read_bytes().count(b"\n") + 1
    for row in rows:
        file, line = row.where.rsplit(":", 1)
        assert file == str(path) and 2 <= int(line) <= lines
        assert isinstance(row, BadRow) or row.fields.keys() == {"a", "b"}


def test_a_record_that_is_wrong_leaves_the_others_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1,2\n"x"y,2\n3,4\n5\n\xff,6\n7,8\n9,"no end\n1,2\n')
    rows = list(open_dataset(str(path), "train").rows)
    assert [row.where.rsplit(":", 1)[1] for row in rows] == ["2", "3", "4", "5", "6", "7", "8"]
    assert [row.reason if isinstance(row, BadRow) else row.fields["a"] for row in rows] == [
        "1",
        "malformed CSV: ',' expected after '\"'",
        "3",
        "the header names 2 columns, this row has 1",
        "not UTF-8; save the file as UTF-8",
        "7",
        "malformed CSV: unexpected end of data",
    ]


def test_a_header_that_is_wrong_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n\na,b,a\n1,2,3\n")
    with pytest.raises(UserError, match=r"rows.csv:3: the header names the column 'a' twice"):
        open_dataset(str(path), "train")
    path.write_text('"a"b,c\n1,2\n')
    with pytest.raises(UserError, match=r"rows.csv:1: malformed CSV"):
        open_dataset(str(path), "train")
    for mark in (";", "\t"):
        path.write_text(f"prompt{mark}completion\n1{mark}2\n")
        with pytest.raises(
            UserError, match=r"rows.csv:1: the header is one column, 'prompt.*': are its names separated by '.*'\?"
        ):
            open_dataset(str(path), "train")
    path.write_text("a,b\n")
    with pytest.raises(UserError, match=r"rows.csv: train holds no row"):
        open_dataset(str(path), "train")
