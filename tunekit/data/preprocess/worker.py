"""Tokenize chunks of rows, in this process or as `python -m tunekit.data.preprocess.worker` of a `WorkerPool`.

A worker process ends when the other end of its pipe is closed.
"""

import mmap
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tunekit.data.column_usage import ColumnUsage
from tunekit.data.datasets import DatasetConfig
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import PreprocessSummary, TokenizedChunk, flatten_documents
from tunekit.data.readers.row_reader import BadRow, Row, RowChunk
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.tokenizer_files import TokenizerErrors
from tunekit.errors import UserError

PROGRESS_BYTES = 8  # of the shared memory in which a worker stores the index of its row


def tokenize_chunk(
    config: DatasetConfig, tokenizer: Tokenizer, chunk: RowChunk, progress: memoryview | None = None
) -> TokenizedChunk:
    """Tokenize a chunk. The index of the row that is being rendered is written to `progress`."""
    rows, usage = list(chunk.rows()), ColumnUsage()
    encoded = config.encode_rows(tokenizer, rows if progress is None else track_rows(rows, progress), usage)
    bad_rows = [result for result in encoded if isinstance(result, BadRow)]
    valid = [(row.where, result) for row, result in zip(rows, encoded, strict=True) if isinstance(result, list)]
    documents: list[Document] = [document for _, result in valid for document in result]
    flat = flatten_documents(documents, [location for location, result in valid for _ in result])
    summary = PreprocessSummary(
        rows=len(rows),
        filtered=sum(result is None for result in encoded),
        skipped=len(bad_rows),
        dropped=sum(not result for _, result in valid),
        split=sum(len(result) > config.docs_per_row for _, result in valid),
        columns=usage.reports,
    )
    return TokenizedChunk(chunk.position, summary, bad_rows, flat)


def track_rows(rows: Sequence[Row | BadRow], progress: memoryview) -> Iterator[Row | BadRow]:
    """Rows, each after its index is written to `progress`; after the last one, their number."""
    for index, row in enumerate(rows):
        progress[0] = index
        yield row
    progress[0] = len(rows)


def receive_message(pipe: Connection) -> Any:
    """The next message. Raise EOFError if the pool has ended, also in the middle of a message."""
    try:
        return pipe.recv()
    except OSError as error:
        raise EOFError from error


def serve_chunks(pipe: Connection, progress: memoryview) -> None:
    """Receive the config and tokenizer, then tokenize chunk by chunk."""
    modules, task = receive_message(pipe)
    for module in modules:
        module.load()
    with TokenizerErrors("the tokenizer cannot be copied to a worker process", "Check tokenizer.json."):
        config, tokenizer = pickle.loads(task)
    tokenizer.enable_cache()
    pipe.send(None)  # ready
    while True:
        try:
            result = tokenize_chunk(config, tokenizer, receive_message(pipe), progress)
        except UserError as error:
            result = UserError(str(error))
        pipe.send(result)


def main() -> None:
    pipe, progress = Connection(int(sys.argv[1])), memoryview(mmap.mmap(int(sys.argv[2]), PROGRESS_BYTES)).cast("q")
    os.dup2(2, 1)  # the output of user code must not mix with the output of the command
    try:
        serve_chunks(pipe, progress)
    except (EOFError, ConnectionError):  # the pool has closed the pipe
        pass
    except UserError as error:
        pipe.send(error)


if __name__ == "__main__":
    main()
