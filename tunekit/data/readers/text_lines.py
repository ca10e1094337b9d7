"""What text files of rows have in common: lines, UTF-8, and chunks of a size."""

import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TypeVar

from tunekit.data.readers.filesystem import TROUBLE, DataFile, read_error
from tunekit.data.readers.row_reader import BYTES, ROWS, BadRow, RowChunk
from tunekit.errors import UserError

Item = TypeVar("Item")
LONGEST = 2**28  # bytes of a row; more is a file of another kind, and would fill the memory
BLANK = b" \t\r\n\v\f\xef\xbb\xbf"  # white space and byte order marks
FIRST = 10  # rows; a file none of which can be read is no file of rows


def decode_utf8(raw: bytes) -> str:
    """Text of UTF-8 bytes, a byte order mark at their beginning left out; ValueError says which byte is none."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}); save it as UTF-8") from None


def open_text(file: DataFile) -> io.BufferedReader:
    """A file at its beginning, which must be text."""
    try:
        opened = file.open()
        head = opened.peek(1)[:1024]
    except TROUBLE as error:
        raise read_error(file.name, error) from None
    if head.startswith(b"\x1f\x8b"):
        raise UserError(f"{file.name}: is packed with gzip; give it a name that ends in .gz")
    if b"\0" in head.partition(b"\n")[0]:
        raise UserError(f"{file.name}: is no UTF-8 text: it is binary, or UTF-16")
    return opened


def split_lines(file: io.BufferedReader, name: str, number: int) -> Iterator[bytes]:
    """Lines with their ends; `number` is that of the first."""
    try:
        for line in iter(partial(file.readline, LONGEST), b""):
            if len(line) == LONGEST:
                raise UserError(f"{name}:{number}: a line of more than {LONGEST >> 20} MB: not a file of rows")
            yield line
            number += 1
    except TROUBLE as error:
        raise read_error(f"{name}:{number}", error) from None


def chunked(items: Iterable[Item], length_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items in lists that make a chunk each."""
    group: list[Item] = []
    size = 0
    for item in items:
        length = length_of(item)
        if group and (len(group) == ROWS or size + length > BYTES):
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    if group:
        yield group


def check_first_rows(chunk: RowChunk, wanted: str) -> None:
    """UserError for a file that begins with many rows, none of which can be read: its rows are another thing."""
    found = list(islice(chunk.rows(), FIRST))
    faults = [row for row in found if isinstance(row, BadRow)]
    if len(faults) == FIRST:
        told = f"{faults[0].where}: {faults[0].reason}"
        raise UserError(f"{told}; nor can any of the {FIRST - 1} rows after it be read: want {wanted}")
