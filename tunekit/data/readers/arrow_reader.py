"""Readers of Arrow and Parquet files. A separate module because pyarrow is slow to import."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from tunekit.data.readers.filesystem import READ_ERRORS, LocalFile, RowFile
from tunekit.data.readers.row_reader import CHUNK_BYTES, CHUNK_ROWS, BadRow, FileOffset, Row, RowChunk
from tunekit.errors import UserError

MAGIC = b"ARROW1"  # start of the random-access format; files without it are streams, which `datasets` writes
JSON_EXTENSION = "arrow.json"  # extension type of JSON strings, which `datasets` uses for values of mixed types


@dataclass(frozen=True)
class ColumnChunk:
    """Rows of columnar data. Pickled as an Arrow stream of only these rows."""

    name: str
    position: FileOffset
    batch: pyarrow.RecordBatch

    @property
    def count(self) -> int:
        return self.batch.num_rows

    def rows(self) -> Iterator[Row | BadRow]:
        convert = make_converter(pyarrow.struct(list(self.batch.schema)))
        try:
            rows = [Row(self.where(row), convert(fields)) for row, fields in enumerate(self.batch.to_pylist())]
        except (ValueError, RecursionError):
            rows = [self.read_row(row, convert) for row in range(self.count)]
        return iter(rows)

    def read_row(self, index: int, convert: Callable[[Any], Any]) -> Row | BadRow:
        """Convert one row. Conversion fails for invalid UTF-8 and for dates that Python cannot represent."""
        try:
            return Row(self.where(index), convert(self.batch.slice(index, 1).to_pylist()[0]))
        except (ValueError, RecursionError) as error:
            return BadRow(self.where(index), f"cannot convert: {first_line(error)}")

    def where(self, index: int) -> str:
        return f"{self.name} row {self.position.line + index}"

    def __reduce__(self):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self.batch.schema) as stream:
            stream.write_batch(self.batch)
        return unpickle_chunk, (self.name, self.position, sink.getvalue().to_pybytes())


@contextmanager
def wrap_arrow_errors(name: str, file_format: str) -> Iterator[None]:
    """Turn errors of pyarrow and of reading into UserErrors."""
    try:
        yield
    except (*READ_ERRORS, pyarrow.ArrowException) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise UserError(f"{name}: cannot read the {file_format} file: {reason}") from None


@dataclass(frozen=True)
class ColumnarFile(RowFile):
    """Base class of columnar files. Offsets are rows."""

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        return iter_chunks(self.file.name, self.batches(position.offset), position)

    def batches(self, num_skipped: int) -> Iterator[pyarrow.RecordBatch]:
        """Batches of at most the size of a chunk, without the first `num_skipped` rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class ParquetFile(ColumnarFile):
    """A Parquet file whose row groups are decoded in small batches."""

    def count(self, limit: int | None) -> int:
        with self.open_parquet() as file:
            return file.metadata.num_rows

    def batches(self, num_skipped: int) -> Iterator[pyarrow.RecordBatch]:
        with self.open_parquet() as file:
            for index in range(file.num_row_groups):
                group = file.metadata.row_group(index)
                if num_skipped < group.num_rows:
                    rows = max(1, min(CHUNK_ROWS, group.num_rows * CHUNK_BYTES // max(group.total_byte_size, 1)))
                    yield from iter_batches(file.iter_batches(rows, [index], use_threads=False), num_skipped)
                num_skipped = max(num_skipped - group.num_rows, 0)

    @contextmanager
    def open_parquet(self) -> Iterator[pyarrow.parquet.ParquetFile]:
        """Open the file without buffering row groups: a file may consist of a single large one."""
        with wrap_arrow_errors(self.file.name, "Parquet"), self.file.open() as raw:
            yield pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False)


@dataclass(frozen=True)
class ArrowFile(ColumnarFile):
    """An Arrow file or stream. Skipping rows is cheap."""

    def batches(self, num_skipped: int) -> Iterator[pyarrow.RecordBatch]:
        with wrap_arrow_errors(self.file.name, "Arrow"), self.open_arrow() as file:
            magic = file.read(len(MAGIC))
            file.seek(0)
            if magic == MAGIC:
                reader = pyarrow.ipc.open_file(file)
                yield from iter_batches(map(reader.get_batch, range(reader.num_record_batches)), num_skipped)
            else:
                yield from iter_batches(pyarrow.ipc.open_stream(file), num_skipped)

    def open_arrow(self) -> pyarrow.NativeFile:
        """Open the file. Local files are memory-mapped, so that skipped rows are not read."""
        if isinstance(self.file, LocalFile):
            return pyarrow.memory_map(str(self.file.path))
        return pyarrow.PythonFile(self.file.open(), "r")


def iter_chunks(name: str, batches: Iterable[pyarrow.RecordBatch], position: FileOffset) -> Iterator[ColumnChunk]:
    """Chunks of consecutive batches, the first of which starts at `position`."""
    for batch in batches:
        yield ColumnChunk(name, position, batch)
        position = position.advance(batch.num_rows)


def iter_batches(batches: Iterable[pyarrow.RecordBatch], num_skipped: int) -> Iterator[pyarrow.RecordBatch]:
    """Split batches to the size of a chunk, and skip the first rows."""
    for batch in batches:
        rows = max(1, min(CHUNK_ROWS, batch.num_rows * CHUNK_BYTES // max(batch.nbytes, 1)))
        for start in range(num_skipped, batch.num_rows, rows):
            yield batch.slice(start, rows)
        num_skipped = max(num_skipped - batch.num_rows, 0)


def unpickle_chunk(name: str, position: FileOffset, stream: bytes) -> ColumnChunk:
    return ColumnChunk(name, position, pyarrow.ipc.open_stream(stream).read_next_batch())


def make_converter(arrow_type: pyarrow.DataType) -> Callable[[Any], Any]:
    """Return a function that parses the JSON strings in a value of this type."""
    if isinstance(arrow_type, pyarrow.BaseExtensionType) and arrow_type.extension_name == JSON_EXTENSION:
        return lambda value: None if value is None else json.loads(value)
    if isinstance(arrow_type, pyarrow.StructType):
        converters = {field.name: make_converter(field.type) for field in arrow_type}
        converters = {name: convert for name, convert in converters.items() if convert is not identity}
        return partial(convert_struct, converters) if converters else identity
    if isinstance(arrow_type, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        convert = make_converter(arrow_type.value_type)
        if convert is identity:
            return identity
        return lambda value: None if value is None else [convert(item) for item in value]
    return identity


def identity(value: Any) -> Any:
    return value


def convert_struct(converters: dict[str, Callable[[Any], Any]], value: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else value | {name: convert(value[name]) for name, convert in converters.items()}


def first_line(error: Exception) -> str:
    """Return the first line of an error message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def open_zstd(file: io.BufferedReader) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), CHUNK_BYTES)  # type: ignore[arg-type]
