"""CSV with any damage: rows equal those of the standard library, and bad rows have a line number."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.row_files import small_chunks
from tests.unit.data.test_chunks import check_resumes
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, require_row
from tunekit.errors import UserError

# A lone carriage return is left out: csv.writer writes it without quotes, and then it ends a line.
CELLS = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=8)
CELLS |= st.sampled_from(["", '"', '""', "a,b", "a\nb", "a\r\nb", "né", "x" * 200])


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
@settings(max_examples=100, deadline=None)
def test_csv_round_trip(rows, end, mark, tmp_path_factory) -> None:
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
        read_rows = [require_row(row) for row in table.rows]
        check_resumes(table)
    assert [tuple(row.fields.values()) for row in read_rows] == rows
    assert [row.where for row in read_rows] == [f"{path}:{start}" for start in starts]


@given(
    pieces=st.lists(
        st.sampled_from(
            [b"a", b",", b'"', b'""', b"\n", b"\r\n", b"\r", b"\xff", b"\0", b"\xef\xbb\xbf", "né".encode()]
        )
    )
)
@settings(max_examples=250, deadline=None)
def test_damaged_csv_gives_rows_or_a_one_line_error(pieces: list[bytes], tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rows.csv"
    path.write_bytes(b"a,b\n1,2\n" + b"".join(pieces))
    with small_chunks(2, 10):
        try:
            table = open_dataset(str(path), "train")
            rows = list(table.rows)
        except UserError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            return
        check_resumes(table)
    lines = path.read_bytes().count(b"\n") + 1
    for row in rows:
        file, line = row.where.rsplit(":", 1)
        assert file == str(path) and 2 <= int(line) <= lines
        assert isinstance(row, BadRow) or row.fields.keys() == {"a", "b"}


def test_bad_record_does_not_affect_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1,2\n"x"y,2\n3,4\n5\n\xff,6\n7,8\n9,"no end\n1,2\n')
    rows = list(open_dataset(str(path), "train").rows)
    assert [row.where.rsplit(":", 1)[1] for row in rows] == ["2", "3", "4", "5", "6", "7", "8"]
    values = [row.reason if isinstance(row, BadRow) else row.fields["a"] for row in rows]
    expected = ["1", "','", "3", "2 columns", "UTF-8", "7", "end of data"]
    assert all(part in value for value, part in zip(values, expected, strict=True))


def test_invalid_header_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n\na,b,a\n1,2,3\n")
    with pytest.raises(UserError, match=r"rows\.csv:3: .*'a'"):
        open_dataset(str(path), "train")
    path.write_text('"a"b,c\n1,2\n')
    with pytest.raises(UserError, match=r"rows\.csv:1: "):
        open_dataset(str(path), "train")
    path.write_text("a,b\n")
    with pytest.raises(UserError, match=r"rows\.csv: .*train"):
        open_dataset(str(path), "train")
    for text in ('{"a": 1}\n{"a": 2}\n', '[\n  {"a": 1}\n]\n', "[[1, 2]]\n[[3]]\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"rows\.csv:1: .*JSON"):
            open_dataset(str(path), "train")


def test_names_in_brackets_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("[id],{text}\n1,a\n")
    (row,) = open_dataset(str(path), "train").rows
    assert require_row(row).fields == {"[id]": "1", "{text}": "a"}
