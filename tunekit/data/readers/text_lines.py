"""Lines, UTF-8 decoding, and chunking for readers of text formats."""

import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from tunekit.data.readers.filesystem import READ_ERRORS, DataFile, read_error, wrap_read_errors
from tunekit.data.readers.row_reader import CHUNK_BYTES, CHUNK_ROWS, MAX_ROW_BYTES
from tunekit.errors import UserError

Item = TypeVar("Item")
MAX_BLANK_BYTES = 2**21  # blank lines and whitespace between two rows; more may never end
BLANK = b" \t\r\n\v\f\xef\xbb\xbf"  # whitespace and byte order marks


def decode_utf8(raw: bytes) -> str:
    """Decode UTF-8 without the byte order mark. Raise ValueError with the position of an invalid byte."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}). Save it as UTF-8.") from None


def open_text(file: DataFile) -> io.BufferedReader:
    """Open a text file. Raise UserError if it is compressed or binary."""
    with wrap_read_errors(file.name):
        stream = file.open()
        head = stream.peek(1)[:1024]
    if head.startswith(b"\x1f\x8b"):
        raise UserError(f"{file.name}: file is compressed with gzip. Rename it to end in .gz.")
    if b"\0" in head.partition(b"\n")[0]:
        raise UserError(f"{file.name}: not UTF-8 text (binary or UTF-16)")
    return stream


def split_lines(file: io.BufferedReader, name: str, number: int) -> Iterator[bytes]:
    """Yield lines with their line breaks. `number` is the number of the first line."""
    try:
        for line in iter(partial(file.readline, MAX_ROW_BYTES), b""):
            if len(line) == MAX_ROW_BYTES:
                raise row_too_long(f"{name}:{number}")
            yield line
            number += 1
    except READ_ERRORS as error:
        raise read_error(f"{name}:{number}", error) from None


def row_too_long(where: str) -> UserError:
    return UserError(f"{where}: the row is longer than {MAX_ROW_BYTES >> 20} MB. Check that the file has its format.")


def check_blank(where: str, num_bytes: int) -> None:
    """Raise UserError if a file has no row in this many bytes."""
    if num_bytes > MAX_BLANK_BYTES:
        raise UserError(f"{where}: no row in {num_bytes >> 20} MB of blank lines. Remove them.")


def chunked(items: Iterable[Item], length_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Group items into lists that fit the limits of a chunk."""
    group: list[Item] = []
    size = 0
    for item in items:
        length = length_of(item)
        if group and (len(group) == CHUNK_ROWS or size + length > CHUNK_BYTES):
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    if group:
        yield group
