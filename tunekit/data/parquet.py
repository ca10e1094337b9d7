"""Rows of Parquet files. A module of its own because pyarrow is slow to import."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from tunekit.data.table import Row, Table
from tunekit.errors import UserError


def parquet_file(path: Path) -> Table:
    """The rows of a Parquet file, read a few at a time."""
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
    return Table(file.metadata.num_rows, parquet_rows(path, file))


def parquet_rows(path: Path, file: pyarrow.parquet.ParquetFile) -> Iterator[Row]:
    number = 0
    try:
        for batch in file.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{path} row {number}", fields)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: unreadable after row {number}: {str(error).splitlines()[0]}") from None
