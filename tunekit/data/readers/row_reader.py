"""Rows with their locations, read in chunks that are sent to worker processes and from which reading can resume."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, NoReturn, Protocol

from tunekit.errors import UserError

# Maximum rows and bytes of a chunk. A single larger row is a chunk of its own.
CHUNK_ROWS, CHUNK_BYTES = 512, 2**20
MAX_ROW_BYTES = 2**26  # of a row of text, and of a column of a row: a longer one is not a row, and exhausts memory
TYPE_NAMES = {type(None): "null", str: "a string", bool: "a boolean", dict: "an object", list: "a list"}


class Row(NamedTuple):
    """One row of a dataset. `where` is its file and line, for error messages."""

    where: str
    fields: dict[str, Any]


class BadRow(NamedTuple):
    """A row that cannot be parsed or trained on, and the reason."""

    where: str
    reason: str


@dataclass(frozen=True, eq=False)
class UnreadableCell:
    """A value that has no Python type or is too large. It may be passed on, but any use of it raises UserError."""

    column: str
    reason: str

    def raise_error(self) -> NoReturn:
        raise UserError(f"column {self.column!r} cannot be read: {self.reason}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnreadableCell):
            self.raise_error()
        return (self.column, self.reason) == (other.column, other.reason)

    def __hash__(self) -> int:
        self.raise_error()

    def __bool__(self) -> bool:
        self.raise_error()

    def __str__(self) -> str:
        self.raise_error()

    def __iter__(self) -> Iterator[Any]:
        self.raise_error()


def json_type(value: Any) -> str:
    """Return the JSON type of a value with its article, for error messages."""
    if isinstance(value, UnreadableCell):
        return f"an unreadable value ({value.reason})"
    return TYPE_NAMES.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


class FileOffset(NamedTuple):
    """A position in a list of files, from which reading can resume."""

    file: int = 0  # index of the file
    offset: int = 0  # bytes from its start; rows for columnar formats
    line: int = 1  # line, or row for formats without lines, from 1
    row: int = 0  # rows before it in all files, including rows before the slice

    def advance(self, rows: int, offset: int | None = None, lines: int | None = None) -> "FileOffset":
        """Position `rows` rows later. By default, a row is one unit of `offset` and one line."""
        offset, lines = self.offset + rows if offset is None else offset, rows if lines is None else lines
        return FileOffset(self.file, offset, self.line + lines, self.row + rows)


class RowChunk(Protocol):
    """Unparsed rows, small and picklable. `RowReader.chunks(chunk.position)` resumes with this chunk."""

    @property
    def position(self) -> FileOffset: ...

    @property
    def count(self) -> int: ...

    def rows(self) -> Iterator[Row | BadRow]: ...


class FileShard:
    """One file of a dataset. Rows are counted by reading it, unless the format stores their number."""

    def count(self, limit: int | None) -> int:
        """Number of rows. Counting may stop at `limit`."""
        count = 0
        for chunk in self.chunks(FileOffset()):
            count += chunk.count
            if limit is not None and count >= limit:
                return limit
        return count

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        """Read chunks from the position of an earlier chunk, or from the start."""
        raise NotImplementedError

    def digest(self, full: bool) -> bytes:
        """Hash of the content if `full`, otherwise of properties that are cheap to read."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChunkSlice:
    """Rows `start` to `stop` of a chunk."""

    chunk: RowChunk
    start: int
    stop: int

    @property
    def position(self) -> FileOffset:
        return self.chunk.position

    @property
    def count(self) -> int:
        return self.stop - self.start

    def rows(self) -> Iterator[Row | BadRow]:
        return islice(self.chunk.rows(), self.start, self.stop)


@dataclass(frozen=True)
class RowReader:
    """Rows `low` to `high` of concatenated files. Can be read repeatedly.

    `counts` are the rows of each file, up to `high`; None for streams, whose rows are not counted.
    """

    shards: tuple[FileShard, ...]
    low: int = 0
    high: int | None = None
    counts: tuple[int, ...] | None = None

    @property
    def count(self) -> int | None:
        """Number of rows; None if unknown."""
        return None if self.counts is None or self.high is None else self.high - self.low

    @property
    def rows(self) -> Iterator[Row | BadRow]:
        """All rows, parsed in this process."""
        for chunk in self.chunks():
            yield from chunk.rows()

    def chunks(self, position: FileOffset | None = None) -> Iterator[RowChunk]:
        """Read chunks from a position on. Files that end before it, or before the slice, are not opened."""
        position = self.first_position() if position is None else position
        for index in range(position.file, len(self.shards)):
            row = position.row
            if self.high is not None and row >= self.high:
                return
            for chunk in self.shards[index].chunks(position):
                if self.high is not None and chunk.position.row >= self.high:
                    return
                first, row = chunk.position.row, chunk.position.row + chunk.count
                start, end = max(self.low - first, 0), row if self.high is None else min(self.high, row)
                if row > self.low:
                    yield chunk if (start, end) == (0, row) else ChunkSlice(chunk, start, end - first)
            position = FileOffset(file=index + 1, row=row)

    def first_position(self) -> FileOffset:
        """Return the start of the file that contains row `low`."""
        row = 0
        for index, count in enumerate(self.counts or ()):
            if row + count > self.low:
                return FileOffset(index, row=row)
            row += count
        return FileOffset()

    def digest(self) -> str:
        """Hash of the slice and of the files' content, but not of their names.

        For streams, only cheap properties of the files are hashed (local files: size, first and last block).
        """
        hasher = hashlib.blake2b(repr((self.low, self.high)).encode(), digest_size=16)
        for shard in self.shards:
            hasher.update(shard.digest(full=self.counts is not None))
        return hasher.hexdigest()


def require_row(row: Row | BadRow) -> Row:
    """Return the row. Raise UserError if it is a BadRow."""
    if isinstance(row, BadRow):
        raise UserError(f"{row.where}: {row.reason}")
    return row
