"""Chunks of rows to documents: here, or as `python -m tunekit.data.prepared.worker FD`, which `pool` starts and asks.

Such a process ends when the other end of its pipe is closed, by whatever.
"""

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from tunekit.data.prepared.documents import Document, Tokenised, flatten
from tunekit.data.rows import Rows
from tunekit.data.sources.table import Chunk, Fault
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

Begin = Callable[[str], object] | None


def tokens(rows: Rows, tokenizer: Tokenizer, chunk: Chunk, begin: Begin = None) -> Tokenised:
    """What a chunk becomes. With `begin`, which is told where each row is from, row by row."""
    read = list(chunk.rows())
    if begin is None:
        found = rows.encode(tokenizer, read)
    else:
        found = []
        for row in read:
            begin(row.where)
            found += rows.encode(tokenizer, [row])
    faults = [result for result in found if isinstance(result, Fault)]
    kept = [(row.where, result) for row, result in zip(read, found, strict=True) if isinstance(result, list)]
    documents: list[Document] = [document for _, result in kept for document in result]
    flat = flatten(documents, [where for where, result in kept for _ in result])
    left_out = sum(result is None for result in found)
    dropped, split = sum(not result for _, result in kept), sum(len(result) > rows.EACH for _, result in kept)
    return Tokenised(chunk.place, len(read), left_out, dropped, split, faults, flat)


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
    rows: Rows, tokenizer: Tokenizer, chunk: Chunk, begin: Callable[[str], object] | None
) -> Tokenised | UserError:
    try:
        return tokens(rows, tokenizer, chunk, begin)
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
