"""Rows of Parquet files. A module of its own because pyarrow is slow to import."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet

from tunekit.data.readers.arrow_reader import TROUBLE, ColumnChunk, first_line, iter_batches
from tunekit.data.readers.filesystem import RowFile, read_error
from tunekit.data.readers.row_reader import BYTES, ROWS, FileOffset, RowChunk
from tunekit.errors import UserError


@dataclass(frozen=True)
class ParquetFile(RowFile):
    """A file whose row groups are decoded a few rows at a time. Places count rows."""

    def count(self, most: int | None) -> int:
        with self.opened() as file:
            return file.metadata.num_rows

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        with self.opened() as file:
            begin = 0
            for number in range(file.num_row_groups):
                rows = file.metadata.row_group(number).num_rows
                if begin + rows > place.offset:
                    for batch in self.batches(file, number, place.offset - begin):
                        yield ColumnChunk(self.file.name, place, batch)
                        place = ColumnChunk.behind(place, batch.num_rows)
                begin += rows

    def batches(self, file: pyarrow.parquet.ParquetFile, number: int, skipped: int) -> Iterator[pyarrow.RecordBatch]:
        """Rows of a row group without its first ones."""
        group = file.metadata.row_group(number)
        rows = max(1, min(ROWS, group.num_rows * BYTES // max(group.total_byte_size, 1)))
        try:
            yield from iter_batches(file.iter_batches(rows, [number], use_threads=False), skipped)
        except TROUBLE as error:
            raise UserError(f"{self.file.name}: row group {number + 1} cannot be read: {first_line(error)}") from None

    @contextmanager
    def opened(self) -> Iterator[pyarrow.parquet.ParquetFile]:
        """The file, its row groups not read whole: one may be as large as all of it."""
        try:
            raw = self.file.open()
        except TROUBLE as error:
            raise read_error(self.file.name, error) from None
        with raw:
            try:
                file = pyarrow.parquet.ParquetFile(raw, buffer_size=BYTES, pre_buffer=False)
            except TROUBLE as error:
                raise UserError(f"{self.file.name}: not a Parquet file: {first_line(error)}") from None
            yield file
