"""JSON with any shape and damage: rows equal those of the standard library, and bad rows have a location."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.row_files import small_chunks
from tests.unit.data.test_chunks import check_resumes
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, Row, UnreadableCell, require_row
from tunekit.errors import UserError

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(-(10**30), 10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
SPACE = st.sampled_from(["", " ", "\n", "\r\n", "\t \n"])
# Unexpected contents, and rare but valid ones.
UNUSUAL = st.sampled_from(
    [
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',  # a surrogate in UTF-8, which is invalid
        b'{"a": "\\ud800"}',  # an escape of half a surrogate pair
        b'{"a": "\\ud83d\\ude00"}',
        b'{"a": "\x00"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1e999}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'{"a": 1} {"a": 2}',
        b'{"a": "unterminated}',
        b"\xef\xbb\xbf{}",
        b"[1, 2]",
        b'"text"',
        b"7",
        b"null",
        b"{",
        b"}",
        b"",
        b" \t",
        b"\r",
        b"\x00\x00\x00",
        b'{"a": "\xe2\x80\xa8"}',
    ]
)
LINES = st.lists(OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")) | UNUSUAL)


def parse_line(line: bytes) -> dict | None:
    """Parse a line; None if it has no row. Integers that are too long for Python make their column unreadable."""
    try:
        value = json.loads(
            line.decode("utf-8-sig"), parse_int=lambda digits: int(digits) if len(digits) < 4300 else None
        )
        if value == {"a": None} and b"null" not in line:
            return {"a": UnreadableCell("a", "it has a number of 5,000 digits")}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_blank(line: bytes) -> bool:
    return not line.replace(b"\xef\xbb\xbf", b"").strip()


@given(lines=LINES, end=st.sampled_from([b"\n", b"\r\n"]), last=st.booleans(), has_bom=st.booleans())
@settings(max_examples=80, deadline=None)
def test_lines_are_rows_or_bad_rows_with_their_number(lines, end, last, has_bom, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    lines = [b'{"first": 1}', *lines]
    path.write_bytes(b"\xef\xbb\xbf" * has_bom + end.join(lines) + end * last)
    with small_chunks(3, 200):
        table = open_dataset(str(path), "train")
        rows = list(table.rows)
        check_resumes(table)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if not is_blank(line)]
    assert [row.where for row in rows] == [f"{path}:{number}" for number, _ in numbered]
    for row, (_, line) in zip(rows, numbered, strict=True):
        expected = parse_line(line)
        assert isinstance(row, BadRow) == (expected is None), row
        if isinstance(row, Row):
            assert repr(row.fields) == repr(expected)  # repr, because nan != nan
        else:
            assert row.reason and "\n" not in row.reason


@given(rows=st.lists(OBJECTS, min_size=1), spaces=st.lists(SPACE, min_size=4, max_size=4), has_bom=st.booleans())
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_list_is_split_into_its_rows(name: str, rows, spaces, has_bom, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / name
    before, after, comma, end = spaces
    texts = [json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode() for row in rows]
    text = f"{before}[{after}{f'{comma},{after}'.join(texts)}{comma}]{end}"
    path.write_bytes(b"\xef\xbb\xbf" * has_bom + text.encode())
    expected = json.loads(text)
    with small_chunks(3, 5):
        table = open_dataset(str(path), "train")
        read_rows = [require_row(row) for row in table.rows]
        check_resumes(table)
    assert [row.where for row in read_rows] == [f"{path} row {number}" for number in range(1, len(expected) + 1)]
    assert repr([row.fields for row in read_rows]) == repr(expected)


@given(
    items=st.lists(OBJECTS.map(json.dumps).map(str.encode) | UNUSUAL),
    begin=st.sampled_from([b"[", b"", b"{", b'{"data": [', b" [\n"]),
    end=st.sampled_from([b"]", b"", b"}", b"]}", b",]", b"] ["]),
    comma=st.sampled_from([b",", b"\n", b",\n", b" "]),
)
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.json.gz"])
def test_damaged_json_gives_rows_or_a_one_line_error(name, items, begin, end, comma, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / name
    raw = begin + comma.join(items) + end
    path.write_bytes(gzip.compress(raw, mtime=0) if name.endswith(".gz") else raw)
    with small_chunks(3, 100):
        try:
            table = open_dataset(str(path), "train")
            rows = list(table.rows)
        except UserError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            return
        check_resumes(table)
    assert all(row.where.startswith(str(path)) for row in rows)
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return
    if isinstance(value, list):
        assert len(rows) == len(value)


def test_malformed_list_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [json.dumps({"text": "x" * 50, "number": number}) for number in range(200)]
    path.write_text("[\n" + ",\n".join([*rows[:150], '{"text" "x"}', *rows[150:]]) + "\n]")
    with pytest.raises(UserError, match=r"rows\.json:152: .*':' delimiter at column 9"):
        open_dataset(str(path), "train")
    path.write_text("[\n" + ",\n".join(rows))
    with pytest.raises(UserError, match=r"rows\.json:201: "):
        open_dataset(str(path), "train")
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n{}")
    with pytest.raises(UserError, match=r"rows\.json:203: "):
        open_dataset(str(path), "train")


@pytest.mark.parametrize(("value", "kind"), [("null", "null"), ("3", "a number"), ("[1]", "a list")])
def test_other_json_values_are_named_by_their_type(value: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"a": 1}}\n{value}\n')
    row = list(open_dataset(str(tmp_path / "rows.jsonl"), "train").rows)[1]
    assert isinstance(row, BadRow) and row.reason.endswith(f"got {kind}")
    if not value.startswith("["):
        (tmp_path / "rows.json").write_text(value)
        with pytest.raises(UserError, match=f"got {kind}$"):
            open_dataset(str(tmp_path / "rows.json"), "train")


@pytest.mark.parametrize("length", [1, 3, 30, 200, -9, -1])
@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.csv.gz"])
def test_truncated_gzip_file_is_an_error(name: str, length: int, tmp_path: Path) -> None:
    rows = [{"text": f"{number * 7919 % 1000} {number}"} for number in range(300)]
    text = json.dumps(rows) if ".json." in name else "\n".join(map(json.dumps, rows))
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode(), mtime=0)[:length])
    with pytest.raises(UserError, match=rf"{name}(:\d+)?: ") as error:
        list(open_dataset(str(path), "train").rows)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raw", "pattern"),
    [
        (gzip.compress(b'{"a": 1}\n' * 20, mtime=0), r"gzip.*\.gz"),
        (b"\x89PNG\r\x00\x00\x1a\n" * 50, "UTF-8"),
        ('{"a": 1}\n'.encode("utf-16") * 20, "UTF-8"),
    ],
    ids=["gzip", "png", "utf-16"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_binary_file_is_rejected(name: str, raw: bytes, pattern: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=f"{name}: .*{pattern}"):
        open_dataset(str(tmp_path / name), "train")


def test_overlong_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunekit.data.readers.text_lines.MAX_ROW_BYTES", 1000)
    monkeypatch.setattr("tunekit.data.readers.json_reader.MAX_ROW_BYTES", 1000)
    for name in ("rows.jsonl", "rows.json"):
        path = tmp_path / name
        path.write_text(('{"a": "' if name == "rows.jsonl" else '[{"a": "') + "x" * 5_000_000)
        with pytest.raises(UserError, match=f"{name}(:| row )1: "):
            open_dataset(str(path), "train")


@pytest.mark.parametrize("end", ["\n", "\r\n", "", " \t\n"])
@pytest.mark.parametrize(("line", "fault"), [
    ('{"a": [1, {"b": 2}', "Expecting ',' delimiter at column 19"),
    ('{"a":', "Expecting value at column 6"),
    ('{"a": "b', "Unterminated string starting at column 7"),
])  # fmt: skip
def test_truncated_line_has_its_column(tmp_path: Path, line: str, fault: str, end: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(f'{{"a": 1}}\n{line}{end}'.encode())
    row = list(open_dataset(str(tmp_path / "rows.jsonl"), "train").rows)[1]
    assert isinstance(row, BadRow)
    assert row.reason.endswith(fault)
    (tmp_path / "rows.json").write_bytes(f"{line}{end}".encode())
    with pytest.raises(UserError, match=f"rows.json:1: .*{fault}"):
        open_dataset(str(tmp_path / "rows.json"), "train")
