"""Sizes of the messages of an Arrow file or stream: a few kilobytes can decompress to gigabytes.

A message is a flatbuffer and a body (https://arrow.apache.org/docs/format/Columnar.html#serialization-and-ipc).
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow

CONTINUATION = 0xFFFFFFFF  # before the length of a message, since version 0.15 of the format
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # values of MessageHeader


class ArrowMessage(NamedTuple):
    """A message of an Arrow stream: whether it is a record batch, its rows, and the bytes that are decompressed."""

    is_batch: bool
    num_rows: int
    unfolded: int


def read_message(file: pyarrow.NativeFile, offset: int) -> ArrowMessage | None:
    """Read the message at an offset, and move to the next one; None at the end. Raise ValueError if it is invalid."""
    try:
        return parse_message(file, offset)
    except struct.error as error:
        raise ValueError(f"invalid message at byte {offset}: {error}") from error


def parse_message(file: pyarrow.NativeFile, offset: int) -> ArrowMessage | None:
    """Parse the message at an offset. Raise struct.error if it is invalid."""
    file.seek(offset)
    raw = file.read(8)
    if len(raw) < 8:
        return None
    is_new, length = struct.unpack("<II", raw)
    start = offset + (8 if is_new == CONTINUATION else 4)
    length = length if is_new == CONTINUATION else is_new
    if length == 0:
        return None
    file.seek(start)
    table = Flatbuffer(file.read(length))
    message = table.follow(0)
    kind, body = table.read_field(message, 1, "B"), table.read_field(message, 3, "q")
    body_start = start + length
    end = body_start + body
    if body < 0 or end > file.size():
        raise struct.error("the body ends after the file")
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH):
        file.seek(end)
        return ArrowMessage(False, 0, 0)
    batch = table.follow_field(message, 2)
    if kind == DICTIONARY_BATCH:
        batch = table.follow_field(batch, 1)
    unfolded = 0
    if table.find_field(batch, 3) is not None:  # compressed buffers start with their decompressed length
        for position, size in table.read_pairs(batch, 2):
            if size > 8:
                file.seek(body_start + position)
                unfolded += max(struct.unpack("<q", file.read(8))[0], size)
    num_rows = table.read_field(batch, 0, "q")
    if num_rows < 0:
        raise struct.error("negative number of rows")
    file.seek(end)
    return ArrowMessage(kind == RECORD_BATCH, num_rows, unfolded)


class Flatbuffer:
    """A table in the format of flatbuffers. Raises struct.error for offsets outside of it."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def read(self, code: str, position: int) -> int:
        if position < 0:
            raise struct.error("negative offset")
        return struct.unpack_from(f"<{code}", self.raw, position)[0]

    def follow(self, position: int) -> int:
        return position + self.read("I", position)

    def find_field(self, table: int, index: int) -> int | None:
        """Position of a field; None if it has its default."""
        vtable = table - self.read("i", table)
        slot = 4 + 2 * index
        offset = self.read("H", vtable + slot) if slot < self.read("H", vtable) else 0
        return table + offset if offset else None

    def read_field(self, table: int, index: int, code: str) -> int:
        position = self.find_field(table, index)
        return 0 if position is None else self.read(code, position)

    def follow_field(self, table: int, index: int) -> int:
        position = self.find_field(table, index)
        if position is None:
            raise struct.error("missing field")
        return self.follow(position)

    def read_pairs(self, table: int, index: int) -> Iterator[tuple[int, int]]:
        """Pairs of 64-bit numbers in a vector of structs."""
        vector = self.follow_field(table, index)
        for item in range(self.read("I", vector)):
            start = vector + 4 + 16 * item
            yield self.read("q", start), self.read("q", start + 8)
