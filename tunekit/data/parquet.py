"""Rows of Parquet files. A module of its own because pyarrow is slow to import."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet

from tunekit.data.arrow import TROUBLE, ColumnChunk, pieces, told
from tunekit.data.storage import RowFile
from tunekit.data.table import BYTES, ROWS, Chunk, Place
from tunekit.errors import UserError


@dataclass(frozen=True)
class Parquet(RowFile):
    """A file whose row groups are decoded a few rows at a time. Places count rows."""

    def count(self, most: int | None) -> int:
        with self.opened() as file:
            return file.metadata.num_rows

    def chunks(self, place: Place) -> Iterator[Chunk]:
        with self.opened() as file:
            begin = 0
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if begin + group.num_rows > place.offset:
                    for batch in self.batches(file, number, place.offset - begin):
                        yield ColumnChunk(self.file.name, place, batch)
                        place = ColumnChunk.behind(place, batch.num_rows)
                begin += group.num_rows

    def batches(self, file: pyarrow.parquet.ParquetFile, number: int, skipped: int) -> Iterator[pyarrow.RecordBatch]:
        """Rows of a row group without its first ones."""
        group = file.metadata.row_group(number)
        rows = max(1, min(ROWS, group.num_rows * BYTES // max(group.total_byte_size, 1)))
        try:
            yield from pieces(file.iter_batches(rows, [number], use_threads=False), skipped)
        except TROUBLE as error:
            raise UserError(f"{self.file.name}: row group {number + 1} cannot be read: {told(error)}") from None

    def opened(self) -> pyarrow.parquet.ParquetFile:
        try:
            # A buffer keeps a row group from being read whole, which may be as large as the file.
            return pyarrow.parquet.ParquetFile(self.file.open(), buffer_size=BYTES)
        except TROUBLE as error:
            raise UserError(f"{self.file.name}: not a Parquet file: {told(error)}") from None
