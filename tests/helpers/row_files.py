"""Row files in every supported format, and small chunk sizes so that short files have many chunks."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from tunekit.data.readers import arrow_reader, hf_datasets, json_reader, text_lines

KINDS = ("jsonl", "json", "csv", "parquet", "arrow", "feather.arrow", "jsonl.gz", "json.gz", "csv.gz", "jsonl.zst")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a file in the format of its suffix."""
    path.write_bytes(encode_rows(path.name, rows))
    return path


def encode_rows(name: str, rows: list[dict[str, Any]]) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(encode_rows(name[:-3], rows), mtime=0)  # bytes that do not depend on the clock
    if name.endswith(".zst"):
        return pyarrow.compress(encode_rows(name[:-4], rows), "zstd", asbytes=True)
    if name.endswith((".parquet", ".arrow")):
        return encode_columns(name, rows)
    if name.endswith(".csv"):
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().encode("utf-8-sig")
    if name.endswith(".jsonl"):
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return json.dumps(rows, ensure_ascii=False, indent=1).encode()


def encode_columns(name: str, rows: list[dict[str, Any]]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, sink, row_group_size=7)
    elif name.endswith("feather.arrow"):
        pyarrow.feather.write_feather(table, sink, chunksize=7)
    else:
        with pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


@contextmanager
def small_chunks(rows: int = 3, size: int = 64) -> Iterator[None]:
    """Limit chunks to `rows` rows and `size` bytes, and read blocks of `size` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (arrow_reader, text_lines, json_reader, hf_datasets):
            for name, value in {"CHUNK_ROWS": rows, "CHUNK_BYTES": size}.items():
                if name in vars(module):
                    patch.setattr(module, name, value)
        yield
