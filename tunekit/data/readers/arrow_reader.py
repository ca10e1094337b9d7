"""Readers of Arrow and Parquet files. A separate module because pyarrow is slow to import."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from tunekit.data.readers.arrow_cells import first_line, read_cells, unfolded_bytes
from tunekit.data.readers.arrow_messages import read_message
from tunekit.data.readers.filesystem import LocalFile, RowFile
from tunekit.data.readers.library_errors import LibraryErrors
from tunekit.data.readers.parquet_pages import plan_row_group
from tunekit.data.readers.row_reader import CHUNK_BYTES, CHUNK_ROWS, FileOffset, Row, RowChunk, UnreadableCell
from tunekit.errors import UserError

MAGIC = b"ARROW1"  # start of the random-access format; files without it are streams, which `datasets` writes
MAGIC_BYTES = 8  # with padding
MAX_BATCH_BYTES = 2**30  # decompressed size of a record batch, which is decompressed at once


@dataclass(frozen=True)
class ColumnChunk:
    """Rows of columnar data. Pickled as an Arrow stream of only these rows. `unreadable`: reasons by column."""

    name: str
    position: FileOffset
    batch: pyarrow.RecordBatch
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.batch.num_rows

    def rows(self) -> Iterator[Row]:
        names = Counter(self.batch.schema.names)
        unreadable = {name: "several columns have this name" for name in names if names[name] > 1}
        unreadable.update(self.unreadable)
        columns = [read_cells(name, column) for name, column in self.columns() if name not in unreadable]
        names = [name for name in self.batch.schema.names if name not in unreadable]
        missing = {name: UnreadableCell(name, reason) for name, reason in unreadable.items()}
        for index in range(self.count):
            fields = {name: column[index] for name, column in zip(names, columns, strict=True)}
            yield Row(f"{self.name} row {self.position.line + index}", fields | missing)

    def columns(self) -> Iterator[tuple[str, pyarrow.Array]]:
        yield from zip(self.batch.schema.names, self.batch.columns, strict=True)

    def __reduce__(self):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self.batch.schema) as stream:
            stream.write_batch(self.batch)
        return unpickle_chunk, (self.name, self.position, sink.getvalue().to_pybytes(), self.unreadable)


def arrow_errors(name: str, file_format: str) -> LibraryErrors:
    """Context manager that turns errors of pyarrow and of reading into UserErrors."""

    def describe(error: Exception) -> str:
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        return f"{name}: cannot read the {file_format} file: {reason}"

    return LibraryErrors(describe)


@dataclass(frozen=True)
class ParquetFile(RowFile):
    """A Parquet file whose row groups are decoded in small batches. Offsets are rows."""

    def count(self, limit: int | None) -> int:
        with self.open_parquet() as (file, _):
            return file.metadata.num_rows

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        with self.open_parquet() as (file, raw):
            num_skipped = position.offset
            for index in range(file.num_row_groups):
                num_rows = file.metadata.row_group(index).num_rows
                if num_skipped < num_rows:
                    group = plan_row_group(file, raw, index)
                    batches = file.iter_batches(group.batch_rows, [index], group.columns, use_threads=False)
                    for batch in iter_batches(batches, num_skipped):
                        yield ColumnChunk(self.file.name, position, batch, group.unreadable)
                        position = position.advance(batch.num_rows)
                num_skipped = max(num_skipped - num_rows, 0)

    @contextmanager
    def open_parquet(self) -> Iterator[tuple[pyarrow.parquet.ParquetFile, io.BufferedReader]]:
        """Open the file without buffering row groups: a file may consist of a single large one."""
        with arrow_errors(self.file.name, "Parquet"), self.file.open() as raw:
            yield pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False), raw


@dataclass(frozen=True)
class ArrowFile(RowFile):
    """An Arrow file or stream. A file is read as the stream that it contains. Offsets are rows, and cheap to skip."""

    def count(self, limit: int | None) -> int:
        with self.open_stream() as (_, file):
            messages = iter(lambda: read_message(file, file.tell()), None)
            return sum(message.num_rows for message in messages if message.is_batch)

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        with self.open_stream() as (stream, file):
            batches = iter_batches(self.read_batches(stream, file), position.offset)
            yield from iter_chunks(self.file.name, batches, position)

    def read_batches(self, stream: Any, file: pyarrow.NativeFile) -> Iterator[pyarrow.RecordBatch]:
        """Batches of the stream, each after its size has been checked."""
        row, offset = 1, file.tell()
        while message := read_message(file, file.tell()):
            if message.unfolded > MAX_BATCH_BYTES:
                problem = f"{message.unfolded >> 20:,} MB in one record batch, more than {MAX_BATCH_BYTES >> 20:,} MB"
                raise UserError(f"{self.file.name} row {row}: {problem}. Write smaller batches.")
            if message.is_batch:
                file.seek(offset)
                yield check_values(stream.read_next_batch())
                row, offset = row + message.num_rows, file.tell()

    @contextmanager
    def open_stream(self) -> Iterator[tuple[pyarrow.RecordBatchReader, pyarrow.NativeFile]]:
        """Open the stream, and the file at its first message after the schema."""
        with arrow_errors(self.file.name, "Arrow"), self.open_arrow() as file:
            if file.read(len(MAGIC)) == MAGIC:
                file.seek(file.size() - len(MAGIC))
                if file.read() != MAGIC:
                    raise ValueError("its end is missing")
                file.seek(MAGIC_BYTES)
            else:
                file.seek(0)
            yield pyarrow.ipc.open_stream(file), file

    def open_arrow(self) -> pyarrow.NativeFile:
        """Open the file. Local files are memory-mapped, so that skipped rows are not read."""
        if isinstance(self.file, LocalFile):
            return pyarrow.memory_map(str(self.file.path))
        return pyarrow.PythonFile(self.file.open(), "r")


def check_values(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return the batch. Raise ArrowInvalid if offsets point outside of its buffers: slices would read there.

    Texts that are not UTF-8 are errors of their rows.
    """
    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid:
        for column in batch.columns:
            column.view(without_encoding(column.type)).validate(full=True)
    return batch


def without_encoding(arrow_type: pyarrow.DataType) -> pyarrow.DataType:
    """Type of the same buffers with bytes instead of texts."""
    types = pyarrow.types
    if types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type):
        large = {pyarrow.large_string(): pyarrow.large_binary(), pyarrow.string_view(): pyarrow.binary_view()}
        return large.get(arrow_type, pyarrow.binary())
    if isinstance(arrow_type, pyarrow.StructType):
        return pyarrow.struct([item.with_type(without_encoding(item.type)) for item in arrow_type])
    if isinstance(arrow_type, pyarrow.ListType):
        return pyarrow.list_(arrow_type.value_field.with_type(without_encoding(arrow_type.value_type)))
    return arrow_type


def iter_chunks(name: str, batches: Iterable[pyarrow.RecordBatch], position: FileOffset) -> Iterator[ColumnChunk]:
    """Chunks of consecutive batches, the first of which starts at `position`."""
    for batch in batches:
        yield ColumnChunk(name, position, batch)
        position = position.advance(batch.num_rows)


def iter_batches(batches: Iterable[pyarrow.RecordBatch], num_skipped: int) -> Iterator[pyarrow.RecordBatch]:
    """Split batches to the size of a chunk, and skip the first rows."""
    for batch in batches:
        size = max(1, sum(map(unfolded_bytes, batch.columns)))
        rows = max(1, min(CHUNK_ROWS, batch.num_rows * CHUNK_BYTES // size))
        for start in range(num_skipped, batch.num_rows, rows):
            yield batch.slice(start, rows)
        num_skipped = max(num_skipped - batch.num_rows, 0)


def unpickle_chunk(name: str, position: FileOffset, stream: bytes, unreadable: Mapping[str, str]) -> ColumnChunk:
    return ColumnChunk(name, position, pyarrow.ipc.open_stream(stream).read_next_batch(), unreadable)


def open_zstd(file: io.BufferedReader) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), CHUNK_BYTES)  # type: ignore[arg-type]
