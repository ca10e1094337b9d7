"""Rows of Arrow files, and of columns in general. A module of its own because pyarrow is slow to import."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow
import pyarrow.ipc

from tunekit.data.readers.filesystem import TROUBLE as READING
from tunekit.data.readers.filesystem import LocalFile, RowFile, read_error
from tunekit.data.readers.row_reader import BYTES, ROWS, BadRow, FileOffset, Row, RowChunk
from tunekit.errors import UserError

TROUBLE = (*READING, pyarrow.ArrowException)
MAGIC = b"ARROW1"  # begins a file that may be read from anywhere; one without it is a stream, as `datasets` writes
JSON = "arrow.json"  # the extension type of a text that is JSON, as `datasets` stores values of mixed types


@dataclass(frozen=True)
class ColumnChunk:
    """A few rows of columns; pickled as the bytes of an Arrow stream, which hold these rows alone."""

    name: str
    place: FileOffset
    batch: pyarrow.RecordBatch

    @property
    def count(self) -> int:
        return self.batch.num_rows

    def rows(self) -> Iterator[Row | BadRow]:
        value = reader(pyarrow.struct(list(self.batch.schema)))
        try:
            found = [Row(self.where(row), value(fields)) for row, fields in enumerate(self.batch.to_pylist())]
        except (ValueError, RecursionError):
            found = [self.row(row, value) for row in range(self.count)]
        return iter(found)

    def row(self, row: int, value: Callable[[Any], Any]) -> Row | BadRow:
        """A single one of rows that cannot all be read: text that is no UTF-8, a date that Python does not know."""
        try:
            return Row(self.where(row), value(self.batch.slice(row, 1).to_pylist()[0]))
        except (ValueError, RecursionError) as error:
            return BadRow(self.where(row), f"cannot be read: {first_line(error)}")

    def where(self, row: int) -> str:
        return f"{self.name} row {self.place.line + row}"

    def __reduce__(self):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self.batch.schema) as stream:
            stream.write_batch(self.batch)
        return unpickled, (self.name, self.place, sink.getvalue().to_pybytes())

    @staticmethod
    def behind(place: FileOffset, rows: int) -> FileOffset:
        """The place after so many rows."""
        return FileOffset(place.file, place.offset + rows, place.line + rows, place.row + rows)


@dataclass(frozen=True)
class ArrowFile(RowFile):
    """An Arrow file or stream. Places count rows; to pass over those before costs next to nothing."""

    def count(self, most: int | None) -> int:
        return sum(batch.num_rows for batch in self.batches())

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        for batch in iter_batches(self.batches(), place.offset):
            yield ColumnChunk(self.file.name, place, batch)
            place = ColumnChunk.behind(place, batch.num_rows)

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        try:
            with self.opened() as file:
                magic = file.read(len(MAGIC))
                file.seek(0)
                if magic == MAGIC:
                    found = pyarrow.ipc.open_file(file)
                    yield from map(found.get_batch, range(found.num_record_batches))
                else:
                    yield from pyarrow.ipc.open_stream(file)
        except READING as error:
            raise read_error(self.file.name, error) from None
        except pyarrow.ArrowException as error:
            raise UserError(f"{self.file.name}: not an Arrow file, or a damaged one: {first_line(error)}") from None

    def opened(self) -> pyarrow.NativeFile:
        """A file of this machine is mapped: what is passed over is not read."""
        if isinstance(self.file, LocalFile):
            return pyarrow.memory_map(str(self.file.path))
        return pyarrow.PythonFile(self.file.open(), "r")


def iter_batches(batches: Iterable[pyarrow.RecordBatch], skipped: int) -> Iterator[pyarrow.RecordBatch]:
    """Batches as large as a chunk, without the first rows."""
    for batch in batches:
        rows = max(1, min(ROWS, batch.num_rows * BYTES // max(batch.nbytes, 1)))
        for start in range(skipped, batch.num_rows, rows):
            yield batch.slice(start, rows)
        skipped = max(skipped - batch.num_rows, 0)


def unpickled(name: str, place: FileOffset, stream: bytes) -> ColumnChunk:
    return ColumnChunk(name, place, pyarrow.ipc.open_stream(stream).read_next_batch())


def reader(kind: pyarrow.DataType) -> Callable[[Any], Any]:
    """What makes a value of this type as Python has it: texts that are JSON are parsed."""
    if isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == JSON:
        return lambda value: None if value is None else json.loads(value)
    if isinstance(kind, pyarrow.StructType):
        parts = {field.name: reader(field.type) for field in kind}
        parts = {name: part for name, part in parts.items() if part is not plain}
        return partial(struct, parts) if parts else plain
    if isinstance(kind, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        part = reader(kind.value_type)
        return plain if part is plain else lambda value: None if value is None else [part(item) for item in value]
    return plain


def plain(value: Any) -> Any:
    return value


def struct(parts: dict[str, Callable[[Any], Any]], value: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else value | {name: part(value[name]) for name, part in parts.items()}


def first_line(error: Exception) -> str:
    """The first line of what a library says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def unzstd(file: io.BufferedReader) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), BYTES)  # type: ignore[arg-type]
