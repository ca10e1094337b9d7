"""Sizes of the pages of a Parquet file, from their headers: a page of a few kilobytes can decompress to gigabytes.

Headers are structs in the compact protocol of Thrift (https://parquet.apache.org/docs/file-format/data-pages).
"""

from collections.abc import Iterator
from io import BufferedReader
from typing import Any, NamedTuple

from tunekit.data.readers.row_reader import CHUNK_BYTES, CHUNK_ROWS

HEADER_BYTES = (2**12, 2**25)  # read for the header of a page; old writers store its longest texts in it
MAX_PAGE_BYTES = 2**29  # of a page, decompressed; writers limit it to 1 MB, except for single values
MAX_PAGES_BYTES = 2**30  # of the pages of all columns that are larger than this:
LARGE_PAGE_BYTES = 2**24
MAX_BATCH_BYTES = 2**29  # of a batch, if all of its rows have the longest entry of a dictionary
# Types of the compact protocol of Thrift.
BOOLEANS, BYTE, VARINTS, DOUBLE, BINARY, LISTS, STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
SIZES = {BYTE: 1, DOUBLE: 8}
DICTIONARY_PAGE = 2  # a value of PageType
# Encodings of values that are longer than their bytes: indices of a dictionary, and common prefixes.
SHARED_ENCODINGS = {"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"}


class PageHeader(NamedTuple):
    """Header of a page: its type, decompressed bytes, number of values if it is a dictionary, and end in the file."""

    page_type: int
    unfolded: int
    num_values: int
    end: int

    def unfolded_values(self, count: int) -> int:
        """Bytes of `count` entries of average length; 0 if the page is not a dictionary."""
        return count * self.unfolded // max(self.num_values, 1) if self.page_type == DICTIONARY_PAGE else 0


class ThriftReader:
    """Reader of structs in Thrift's compact protocol, as numbers by field id. Raises IndexError at the end."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.index = raw, 0

    def read_byte(self) -> int:
        self.index += 1
        return self.raw[self.index - 1]

    def read_varint(self) -> int:
        value = shift = 0
        while (byte := self.read_byte()) & 0x80:
            value, shift = value | (byte & 0x7F) << shift, shift + 7
        return value | byte << shift

    def read_integer(self) -> int:
        value = self.read_varint()
        return value >> 1 ^ -(value & 1)

    def read_struct(self) -> dict[int, Any]:
        fields, field = {}, 0
        while head := self.read_byte():
            field = field + (head >> 4) if head >> 4 else self.read_integer()
            fields[field] = self.read_value(head & 0xF)
        return fields

    def read_value(self, kind: int) -> Any:
        if kind in VARINTS:
            return self.read_integer()
        if kind == STRUCT:
            return self.read_struct()
        if kind in LISTS:
            head = self.read_byte()
            count = head >> 4 if head >> 4 < 15 else self.read_varint()
            kind = BYTE if head & 0xF in BOOLEANS else head & 0xF
            return [self.read_value(kind) for _ in range(count)]
        if kind not in BOOLEANS:  # as a field, a boolean has no bytes
            length = self.read_varint() if kind == BINARY else SIZES[kind]
            self.index += length
        return None


class RowGroup(NamedTuple):
    """How to read a row group: rows of a batch, columns (None: all), and reasons why the others cannot be read."""

    batch_rows: int
    columns: list[str] | None
    unreadable: dict[str, str]


def plan_row_group(file: Any, raw: BufferedReader, index: int) -> RowGroup:
    """Choose the columns and the rows of a batch such that the decompressed data fits into memory."""
    group, names, unreadable = file.metadata.row_group(index), file.schema_arrow.names, {}
    total = shared = large = 0
    for number in range(group.num_columns):
        column = group.column(number)
        path = f"{column.path_in_schema}."  # names may contain dots
        name = max((name for name in names if path.startswith(f"{name}.")), key=len, default="")
        try:
            pages = list(page_headers(raw, column))
        except ValueError as error:
            unreadable[name] = str(error)
            continue
        page = max((page.unfolded for page in pages), default=0)
        if page > LARGE_PAGE_BYTES and (page > MAX_PAGE_BYTES or large + page > MAX_PAGES_BYTES):
            unreadable[name] = f"a page of the row group has {page >> 20:,} MB"
            continue
        values = max((page.unfolded_values(column.num_values) for page in pages), default=0)
        if values // max(group.num_rows, 1) > MAX_PAGE_BYTES:
            unreadable[name] = f"{values // group.num_rows >> 20:,} MB, more than {MAX_PAGE_BYTES >> 20} MB"
            continue
        large += page if page > LARGE_PAGE_BYTES else 0
        total += max(column.total_uncompressed_size, values)
        shared = max(shared, page if SHARED_ENCODINGS.intersection(column.encodings) else 0)
    rows = min(CHUNK_ROWS, group.num_rows * CHUNK_BYTES // max(total, 1), MAX_BATCH_BYTES // max(shared, 1))
    columns = [name for name in names if name not in unreadable] if unreadable else None
    return RowGroup(max(1, rows), columns, unreadable)


def page_headers(file: BufferedReader, column: Any) -> Iterator[PageHeader]:
    """Headers of the dictionary and of the first page of a column chunk; of all pages if the chunk is large."""
    offset = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        offset = min(offset, column.dictionary_page_offset)
    end, has_data = offset + column.total_compressed_size, False
    while offset < end and (not has_data or column.total_uncompressed_size > MAX_PAGE_BYTES):
        header = read_page_header(file, offset)
        yield header
        offset, has_data = header.end, has_data or header.page_type != DICTIONARY_PAGE


def read_page_header(file: BufferedReader, offset: int) -> PageHeader:
    """Read the header of the page at an offset. Raise ValueError if there is none."""
    if offset < 0:
        raise ValueError("a page has a negative offset")
    for size in HEADER_BYTES:
        file.seek(offset)
        reader = ThriftReader(file.read(size))
        try:
            fields = reader.read_struct()
            page_type, unfolded, compressed = fields[1], fields[2], fields[3]
            num_values = fields[7][1] if page_type == DICTIONARY_PAGE else 0
        except (LookupError, TypeError, RecursionError):
            continue
        if min(unfolded, compressed, num_values) >= 0:
            return PageHeader(page_type, unfolded, num_values, offset + reader.index + compressed)
    raise ValueError("a page has an invalid header")
