"""Tokenize chunks of rows, in this process or as `python -m tunekit.data.preprocess.worker FD` of a `WorkerPool`.

A worker process ends when the other end of its pipe is closed.
"""

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedChunk, flatten_documents
from tunekit.data.readers.row_reader import BadRow, RowChunk
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

RowCallback = Callable[[str], object]


def tokenize_chunk(
    config: DatasetConfig, tokenizer: Tokenizer, chunk: RowChunk, on_row: RowCallback | None = None
) -> TokenizedChunk:
    """Tokenize a chunk. With `on_row`, row by row, after a call with the location of each row."""
    rows = list(chunk.rows())
    if on_row is None:
        encoded = config.encode_rows(tokenizer, rows)
    else:
        encoded = []
        for row in rows:
            on_row(row.where)
            encoded += config.encode_rows(tokenizer, [row])
    bad_rows = [result for result in encoded if isinstance(result, BadRow)]
    valid = [(row.where, result) for row, result in zip(rows, encoded, strict=True) if isinstance(result, list)]
    documents: list[Document] = [document for _, result in valid for document in result]
    flat = flatten_documents(documents, [location for location, result in valid for _ in result])
    filtered = sum(result is None for result in encoded)
    dropped = sum(not result for _, result in valid)
    split = sum(len(result) > config.docs_per_row for _, result in valid)
    return TokenizedChunk(chunk.position, len(rows), filtered, dropped, split, bad_rows, flat)


def serve(pipe: Connection) -> None:
    """Receive the config and tokenizer, then tokenize chunk by chunk."""
    modules, task = pipe.recv()
    for module in modules:
        module.load()
    config, tokenizer = pickle.loads(task)
    tokenizer.enable_cache()
    pipe.send(None)  # ready
    while True:
        chunk, row_by_row = pipe.recv()
        pipe.send(process_chunk(config, tokenizer, chunk, pipe.send if row_by_row else None))


def process_chunk(
    config: DatasetConfig, tokenizer: Tokenizer, chunk: RowChunk, on_row: RowCallback | None
) -> TokenizedChunk | UserError:
    """Tokenize a chunk. Return a UserError instead of raising it."""
    try:
        return tokenize_chunk(config, tokenizer, chunk, on_row)
    except UserError as error:
        return UserError(str(error))


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # the output of user code must not mix with the output of the command
    try:
        serve(pipe)
    except (EOFError, ConnectionError):  # the pool has closed the pipe
        pass
    except UserError as error:
        pipe.send(error)


if __name__ == "__main__":
    main()
