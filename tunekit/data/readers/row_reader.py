"""Rows that know where they came from, in pieces that travel to other processes and can be gone on from."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from tunekit.errors import UserError

# A chunk ends before it has more rows or bytes than these. One row alone may have more.
ROWS, BYTES = 512, 2**20


class Row(NamedTuple):
    """One object of a data set; `where` is its file and line, for messages about it."""

    where: str
    fields: dict[str, Any]


class BadRow(NamedTuple):
    """A row that cannot be read or learnt from, and why."""

    where: str
    reason: str


class FileOffset(NamedTuple):
    """Where reading goes on: `offset` bytes (of columns: rows) into a file, with its `line` (or row, from 1) there.

    `row` counts the rows before, of all files, those that the slice leaves out among them.
    """

    file: int = 0
    offset: int = 0
    line: int = 1
    row: int = 0


class RowChunk(Protocol):
    """Some rows that nobody has parsed yet: small, and made to be pickled. `Table.chunks(place)` begins with it."""

    @property
    def place(self) -> FileOffset: ...

    @property
    def count(self) -> int: ...

    def rows(self) -> Iterator[Row | BadRow]: ...


class FileShard(Protocol):
    """One file of a table."""

    def count(self, most: int | None) -> int:
        """How many rows it has; counting may end at `most`."""
        ...

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        """Its rows from a place that it gave, or from its beginning."""
        ...

    def digest(self, whole: bool) -> bytes:
        """A hash of its content; of what tells it from others without reading all, if not `whole`."""
        ...


@dataclass(frozen=True)
class ChunkSlice:
    """The rows of a chunk that a slice takes."""

    chunk: RowChunk
    first: int
    behind: int

    @property
    def place(self) -> FileOffset:
        return self.chunk.place

    @property
    def count(self) -> int:
        return self.behind - self.first

    def rows(self) -> Iterator[Row | BadRow]:
        return islice(self.chunk.rows(), self.first, self.behind)


@dataclass(frozen=True)
class RowReader:
    """Rows `low` to `high` of files, one after the other; may be read again and again.

    `counts` are the rows of the files, as far as the slice needs them; None: a stream, which is not counted.
    """

    parts: tuple[FileShard, ...]
    low: int = 0
    high: int | None = None
    counts: tuple[int, ...] | None = None

    @property
    def count(self) -> int | None:
        """How many rows; None: not known without reading all."""
        return None if self.counts is None or self.high is None else self.high - self.low

    @property
    def rows(self) -> Iterator[Row | BadRow]:
        """All of them, parsed here."""
        for chunk in self.chunks():
            yield from chunk.rows()

    def chunks(self, place: FileOffset | None = None) -> Iterator[RowChunk]:
        """Pieces from a place on. Whole files before it, or before the slice, are not opened."""
        place = self.start() if place is None else place
        for number in range(place.file, len(self.parts)):
            row = place.row
            if self.high is not None and row >= self.high:
                return
            for chunk in self.parts[number].chunks(place):
                if self.high is not None and chunk.place.row >= self.high:
                    return
                row = chunk.place.row + chunk.count
                if row > self.low:
                    yield self.cut(chunk)
            place = FileOffset(file=number + 1, row=row)

    def cut(self, chunk: RowChunk) -> RowChunk:
        """What the slice takes of a chunk."""
        first, behind = max(self.low - chunk.place.row, 0), chunk.count
        behind = behind if self.high is None else min(self.high - chunk.place.row, behind)
        return chunk if (first, behind) == (0, chunk.count) else ChunkSlice(chunk, first, behind)

    def start(self) -> FileOffset:
        """The file that the slice begins in."""
        row = 0
        for number, count in enumerate(self.counts or ()):
            if row + count > self.low:
                return FileOffset(number, row=row)
            row += count
        return FileOffset()

    def digest(self) -> str:
        """A hash of what the files hold and of the slice taken, whatever the files are called.

        Of a stream it is taken from the files' sizes, beginnings and ends: nobody wants to read all before the start.
        """
        found = hashlib.blake2b(repr((self.low, self.high)).encode(), digest_size=16)
        for part in self.parts:
            found.update(part.digest(whole=self.counts is not None))
        return found.hexdigest()


def require_row(row: Row | BadRow) -> Row:
    """A row that must be readable."""
    if isinstance(row, BadRow):
        raise UserError(f"{row.where}: {row.reason}")
    return row
