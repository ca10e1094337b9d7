"""Chunks of rows to documents: here, or as `python -m tunekit.data.preprocess.worker FD`, which `pool` starts and asks.

Such a process ends when the other end of its pipe is closed, by whatever.
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

Begin = Callable[[str], object] | None


def tokenize_chunk(rows: DatasetConfig, tokenizer: Tokenizer, chunk: RowChunk, begin: Begin = None) -> TokenizedChunk:
    """What a chunk becomes. With `begin`, which is told where each row is from, row by row."""
    read = list(chunk.rows())
    if begin is None:
        found = rows.encode_rows(tokenizer, read)
    else:
        found = []
        for row in read:
            begin(row.where)
            found += rows.encode_rows(tokenizer, [row])
    faults = [result for result in found if isinstance(result, BadRow)]
    kept = [(row.where, result) for row, result in zip(read, found, strict=True) if isinstance(result, list)]
    documents: list[Document] = [document for _, result in kept for document in result]
    flat = flatten_documents(documents, [where for where, result in kept for _ in result])
    left_out = sum(result is None for result in found)
    dropped, split = sum(not result for _, result in kept), sum(len(result) > rows.docs_per_row for _, result in kept)
    return TokenizedChunk(chunk.position, len(read), left_out, dropped, split, faults, flat)


def serve(pipe: Connection) -> None:
    """Learn what is wanted, then answer chunk by chunk until nobody asks."""
    own, task = pipe.recv()
    for module in own:
        module.load()
    rows, tokenizer = pickle.loads(task)
    tokenizer.hasten()
    pipe.send(None)  # ready
    while True:
        chunk, alone = pipe.recv()
        pipe.send(answer(rows, tokenizer, chunk, pipe.send if alone else None))


def answer(
    rows: DatasetConfig, tokenizer: Tokenizer, chunk: RowChunk, begin: Callable[[str], object] | None
) -> TokenizedChunk | UserError:
    try:
        return tokenize_chunk(rows, tokenizer, chunk, begin)
    except UserError as error:
        return UserError(str(error))


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # what a person's own code prints is no part of what the command prints
    try:
        serve(pipe)
    except (EOFError, ConnectionError):  # nobody is there any more
        pass
    except UserError as error:
        pipe.send(error)


if __name__ == "__main__":
    main()
