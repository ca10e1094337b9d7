"""Files that unfold to gigabytes, or whose row never ends, are one-line errors in bounded time and memory."""

import gzip
import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tunekit.data import tokenizer as tokenizer_module
from tunekit.data.datasets import ChatDataset, TextDataset
from tunekit.data.readers import arrow_cells, arrow_reader, csv_reader, json_reader, parquet_pages, text_lines
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.parquet_pages import page_headers
from tunekit.data.readers.row_reader import BadRow, Row, UnreadableCell, require_row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

LIMIT = 2**20  # bytes of a row in these tests
LENGTH = 8 * LIMIT
HELLO = b'{"text": "Hello!"}\n'


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arrow_cells, csv_reader, json_reader, text_lines):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", LIMIT)
    monkeypatch.setattr(text_lines, "MAX_BLANK_BYTES", LIMIT)
    monkeypatch.setattr(json_reader, "MAX_OBJECT_BYTES", LIMIT)
    monkeypatch.setattr(arrow_reader, "MAX_BATCH_BYTES", 4 * LIMIT)
    for name in ("MAX_PAGE_BYTES", "MAX_PAGES_BYTES"):
        monkeypatch.setattr(parquet_pages, name, 4 * LIMIT)
    monkeypatch.setattr(parquet_pages, "LARGE_PAGE_BYTES", LIMIT)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("name", "start", "unit", "location"),
    [
        ("line.jsonl", HELLO + b'{"text": "', b"a", ":2: "),
        ("blank.jsonl", HELLO, b"\n", ":"),
        ("number.jsonl", HELLO, b"1", ":2: "),
        ("object.json", b'{"text": "', b"a", " row 1: "),
        ("element.json", b'[{"text": "Hello!"}, {"text": "', b"a", " row 2: "),
        ("space.json", b'[{"text": "Hello!"},', b" ", " row 2: "),
        ("start.json", b"", b" ", ": "),
        ("field.csv", b'text\nHello!\n"', b"a", ":3: "),
        ("lines.csv", b'text\nHello!\n"', b"a\n", ":3: "),
        ("fields.csv", b'text\nHello!\n"', b'\n","', ":3: "),
        ("header.csv", b"", b"a,", ":1: "),
        ("blank.csv", b"text\nHello!\n", b"\n", ":"),
    ],
)
def test_row_without_an_end_is_an_error_with_its_row(
    name: str, start: bytes, unit: bytes, location: str, compressed: bool, tmp_path: Path
) -> None:
    path = tmp_path / (f"{name}.gz" if compressed else name)
    raw = start + unit * (LENGTH // len(unit))
    path.write_bytes(gzip.compress(raw, 1) if compressed else raw)
    with pytest.raises(UserError) as error:
        list(open_dataset(str(path), "train").rows)
    assert str(error.value).startswith(f"{path}{location}") and "\n" not in str(error.value)


def write_cells(path: Path, **columns: pyarrow.Array) -> Path:
    table, kind = pyarrow.table(columns), path.name.partition("-")[0]
    if path.suffix == ".parquet":
        options = {"compression": "zstd", "use_dictionary": kind == "dictionary"}
        pyarrow.parquet.write_table(table, path, **options, dictionary_pagesize_limit=2**30)
    elif kind == "file":
        pyarrow.feather.write_feather(table, str(path), compression="lz4")
    else:
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd" if kind == "stream" else None)
        with pyarrow.ipc.new_stream(str(path), table.schema, options=options) as stream:
            stream.write_table(table)
    return path


KINDS = ("plain-.parquet", "dictionary-.parquet", "file-.arrow", "stream-.arrow", "mapped-.arrow")


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", KINDS)
def test_long_cell_is_unreadable(kind: str, tmp_path: Path) -> None:
    texts = pyarrow.array(["Hello!", "a" * (2 * LIMIT), "Bye."])
    path = write_cells(tmp_path / kind, text=texts, other=pyarrow.array([1, 2, 3]))
    first, second, last = (require_row(row).fields for row in open_dataset(str(path), "train").rows)
    assert (first["text"], last["text"]) == ("Hello!", "Bye.") and second["other"] == 2
    assert isinstance(second["text"], UnreadableCell)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", KINDS[:2])
def test_parquet_page_is_not_unfolded_if_it_is_large(kind: str, tmp_path: Path) -> None:
    """Its column is unreadable, and others are read."""
    texts = pyarrow.array(["Hello!", "a" * LENGTH, "Bye."])
    path = write_cells(tmp_path / kind, huge=texts, text=pyarrow.array(["a", "b", "c"]))
    rows = [require_row(row).fields for row in open_dataset(str(path), "train").rows]
    assert [row["text"] for row in rows] == ["a", "b", "c"]
    assert all(isinstance(row["huge"], UnreadableCell) for row in rows)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", KINDS[2:4])
def test_arrow_batch_is_not_unfolded_if_it_is_large(kind: str, tmp_path: Path) -> None:
    path = write_cells(tmp_path / kind, text=pyarrow.array(["Hello!", "a" * LENGTH]))
    with pytest.raises(UserError, match=rf"^{path} row 1: .*MB"):
        list(open_dataset(str(path), "train").rows)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", ["dictionary-.parquet", "mapped-.arrow"])
def test_rows_that_share_a_text_are_read_in_small_chunks(kind: str, tmp_path: Path) -> None:
    codes = pyarrow.array(np.zeros(500, np.int32))
    shared = pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(["a" * (LIMIT // 2)]))
    path = write_cells(tmp_path / kind, text=shared)
    assert max(chunk.count for chunk in open_dataset(str(path), "train").chunks()) <= 2


def test_page_headers_have_the_sizes_of_the_pages(tmp_path: Path) -> None:
    """The sizes of all pages and headers are those of the column chunk."""
    values = pyarrow.array([f"{number % 999} text" for number in range(20_000)])
    for options in ({}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"compression": "none"}):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": values}), tmp_path / "a.parquet", data_page_size=4096, **options
        )
        column = pyarrow.parquet.read_metadata(tmp_path / "a.parquet").row_group(0).column(0)
        with pytest.MonkeyPatch.context() as patch, io.BufferedReader(io.FileIO(tmp_path / "a.parquet")) as file:
            patch.setattr(parquet_pages, "MAX_PAGE_BYTES", 0)  # so that all pages are read
            pages = list(page_headers(file, column))
        start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
        assert pages[-1].end - start == column.total_compressed_size and len(pages) > 3
        assert sum(page.num_values for page in pages) == (999 if column.has_dictionary_page else 0)


def test_long_text_is_a_bad_row(nano: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_CHARS", 1000)
    for text, is_bad in (("a" * 900, False), ("a" * 1001, True)):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
        for dataset, fields in ((TextDataset("x"), {"text": text}), (ChatDataset("x"), {"messages": messages})):
            (result,) = dataset.encode_rows(nano, [Row("x:1", fields)])
            assert isinstance(result, BadRow) == is_bad
        for encode in (nano.encode, lambda text: nano.encode_with_special((text,), 10)):
            if is_bad:
                with pytest.raises(UserError, match="1,001 characters"):
                    encode(text)


def test_integer_with_too_many_digits_fails_only_if_used(tmp_path: Path, nano: Tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "Hello!", "id": [{"a": %s}], "score": 1e999}\n' % ("9" * 5000))
    (row,) = open_dataset(str(tmp_path / "rows.jsonl"), "train").rows
    assert isinstance(TextDataset("x").encode_rows(nano, [row])[0], list)
    (result,) = TextDataset("x", columns={"text": "id"}).encode_rows(nano, [row])
    assert isinstance(result, BadRow) and "'id'" in result.reason and "5,000" in result.reason
