"""Reader of Parquet files. A separate module because pyarrow is slow to import."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet

from tunekit.data.readers.arrow_reader import ARROW_ERRORS, ColumnChunk, first_line, iter_batches
from tunekit.data.readers.filesystem import RowFile, read_error
from tunekit.data.readers.row_reader import CHUNK_BYTES, CHUNK_ROWS, FileOffset, RowChunk
from tunekit.errors import UserError


@dataclass(frozen=True)
class ParquetFile(RowFile):
    """A Parquet file whose row groups are decoded in small batches. Offsets are rows."""

    def count(self, limit: int | None) -> int:
        with self.open_parquet() as file:
            return file.metadata.num_rows

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        with self.open_parquet() as file:
            first_row = 0
            for index in range(file.num_row_groups):
                rows = file.metadata.row_group(index).num_rows
                if first_row + rows > position.offset:
                    for batch in self.batches(file, index, position.offset - first_row):
                        yield ColumnChunk(self.file.name, position, batch)
                        position = ColumnChunk.advance(position, batch.num_rows)
                first_row += rows

    def batches(self, file: pyarrow.parquet.ParquetFile, index: int, num_skipped: int) -> Iterator[pyarrow.RecordBatch]:
        """Yield the batches of a row group, without its first `num_skipped` rows."""
        group = file.metadata.row_group(index)
        rows = max(1, min(CHUNK_ROWS, group.num_rows * CHUNK_BYTES // max(group.total_byte_size, 1)))
        try:
            yield from iter_batches(file.iter_batches(rows, [index], use_threads=False), num_skipped)
        except ARROW_ERRORS as error:
            raise UserError(f"{self.file.name}: cannot read row group {index + 1}: {first_line(error)}") from None

    @contextmanager
    def open_parquet(self) -> Iterator[pyarrow.parquet.ParquetFile]:
        """Open the file without buffering row groups: a file may consist of a single large one."""
        try:
            raw = self.file.open()
        except ARROW_ERRORS as error:
            raise read_error(self.file.name, error) from None
        with raw:
            try:
                file = pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False)
            except ARROW_ERRORS as error:
                raise UserError(f"{self.file.name}: invalid Parquet file: {first_line(error)}") from None
            yield file
