"""Step number to micro-batches: no state to save, the same rows whatever the ranks and the micro-batch."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from tunekit.data.batch import IGNORE, Batch
from tunekit.data.documents import Document, Documents
from tunekit.data.packing import pack
from tunekit.data.rows import Rows
from tunekit.data.source import open_source
from tunekit.data.table import Fault, Table
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

# Rows are padded to a multiple of this many tokens: kernels are made and tuned anew for every other shape.
MULTIPLE = 16
CHUNK = 512  # rows that become tokens together


def load(choice: Rows, tokenizer: Tokenizer, batch: int, micro_batch: int, run, folder: Path | None = None) -> "Loader":
    """Read and tokenise all rows; UserError names the first that cannot be learnt from. Rank 0 shows a bar."""
    tokenizer = choice.prepare(tokenizer)
    table = open_source(choice.source, choice.split, choice.limit)
    bar = tqdm(total=table.count, desc="preparing", unit=" rows", disable=not run.is_main or None, leave=False)
    with bar:
        documents = Documents(prepared(choice, tokenizer, table, bar))
    order = Order(documents.lengths, run.seed, choice.shuffle, choice.length if choice.pack else None)
    return Loader(documents, order, batch, micro_batch, run, tokenizer.pad)


def prepared(choice: Rows, tokenizer: Tokenizer, table: Table, bar: tqdm) -> Iterator[Document]:
    while chunk := list(islice(table.rows, CHUNK)):
        for found in choice.encode(tokenizer, chunk):
            if isinstance(found, Fault):
                raise UserError(f"{found.where}: {found.reason}")
            yield from found or ()
        bar.update(len(chunk))


class Order:
    """Rows of an epoch, each the documents it holds: a pure function of (seed, epoch).

    `capacity` is the tokens of a packed row; None: each document is a row of its own.
    """

    def __init__(self, lengths: np.ndarray, seed: int, shuffle: bool, capacity: int | None) -> None:
        self.lengths, self.seed, self.shuffle, self.capacity = lengths, seed, shuffle, capacity
        self.epoch = lru_cache(maxsize=1)(self.plan)

    def plan(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng([self.seed % 2**32, epoch])
        order = random.permutation(len(self.lengths)) if self.shuffle else np.arange(len(self.lengths))
        if self.capacity is None:
            return [[document] for document in order.tolist()]
        rows = pack(self.lengths, self.capacity, order)
        return [rows[row] for row in random.permutation(len(rows))] if self.shuffle else sorted(rows, key=min)


@dataclass(frozen=True)
class Report:
    """What an epoch holds. `tokens`, `learnt`, `longest` count tokens; `filled` is the used share of `packed` rows."""

    rows: int
    tokens: int
    learnt: int
    longest: int
    truncated: int
    packed: int | None
    filled: float | None

    def __str__(self) -> str:
        parts = [
            f"{self.rows:,} rows",
            f"{self.tokens:,} tokens",
            f"{self.learnt:,} learnt ({self.learnt / self.tokens:.0%})",
            f"longest {self.longest:,}",
        ]
        parts += [f"{self.truncated:,} truncated"] if self.truncated else []
        parts += [] if self.packed is None else [f"packed into {self.packed:,} rows, {self.filled:.1%} filled"]
        return ", ".join(parts)


class Loader:
    """`loader[step]`: the micro-batches of this rank. Steps go on over epochs; the last of an epoch may be smaller."""

    def __init__(self, documents: Documents, order: Order, batch: int, micro_batch: int, run, pad: int) -> None:
        assert batch > 0 and micro_batch > 0 and len(documents) > 0
        self.rows, self.order, self.run, self.pad = documents, order, run, pad
        self.batch, self.micro_batch = batch, micro_batch
        self.steps_per_epoch = -(-len(order.epoch(0)) // batch)

    def check(self, vocab: int) -> None:
        """UserError if the model has no embedding for a token."""
        highest = max(int(self.rows.tokens.max()), self.pad)
        if highest >= vocab:
            raise UserError(
                f"the rows hold token {highest}, the model knows {vocab}: this tokenizer is another model's"
            )

    def state_dict(self) -> dict[str, int]:
        """What the rows are, so that a run does not go on with others."""
        return {"rows": zlib.crc32(self.rows.learnt.tobytes(), zlib.crc32(self.rows.tokens.tobytes()))}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state != self.state_dict():
            raise UserError("data: these are not the rows that the run began with: bring them back, or use --fresh")

    @property
    def report(self) -> Report:
        """What an epoch holds."""
        rows, capacity = self.rows, self.order.capacity
        packed = None if capacity is None else len(self.order.epoch(0))
        return Report(
            rows=len(rows),
            tokens=len(rows.tokens),
            learnt=rows.targets,
            longest=int(rows.lengths.max()),
            truncated=rows.truncated,
            packed=packed,
            filled=None if packed is None or capacity is None else len(rows.tokens) / (packed * capacity),
        )

    def __getitem__(self, step: int) -> list[Batch]:
        if step < 0:
            raise IndexError(step)
        epoch, at = divmod(step, self.steps_per_epoch)
        rows = self.order.epoch(epoch)[at * self.batch : (at + 1) * self.batch]
        # Longest first: rows of like length share a micro-batch, and a step that does not fit in memory fails at once.
        rows = sorted(rows, key=self.size, reverse=True)
        mine = rows[self.run.rank :: self.run.size]
        parts = [mine[first : first + self.micro_batch] for first in range(0, len(mine), self.micro_batch)]
        most = -(-len(rows[:: self.run.size]) // self.micro_batch)
        # A rank with fewer rows goes through the motions with the others, on a row of which it learns nothing.
        return [self.collate(part) for part in parts] + [self.blank(rows[-1])] * (most - len(parts))

    def size(self, row: list[int]) -> int:
        """Tokens of a row."""
        return int(self.rows.lengths[row].sum())

    def blank(self, row: list[int]) -> Batch:
        batch = self.collate([row])
        return replace(batch, targets=torch.full_like(batch.targets, IGNORE), learnt=0, real=0)

    def collate(self, rows: list[list[int]]) -> Batch:
        longest = max(map(self.size, rows))
        width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, self.order.capacity or longest + MULTIPLE))
        tokens = np.full(len(rows) * width, self.pad, np.int64)
        targets = np.full_like(tokens, IGNORE)
        bounds = [0]
        for end_of_row, row in enumerate(rows, 1):
            for document in map(self.rows.__getitem__, row):
                start, end = bounds[-1], bounds[-1] + len(document.tokens)
                tokens[start:end] = document.tokens
                targets[start : end - 1] = np.where(document.learnt[1:], document.tokens[1:], IGNORE)
                bounds.append(end)
            if self.order.capacity and bounds[-1] < end_of_row * width:
                bounds.append(end_of_row * width)  # what pads a packed row is a document of its own
            bounds[-1] = end_of_row * width
        positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], np.diff(bounds))
        return Batch(
            *(torch.from_numpy(flat).view(len(rows), width) for flat in (tokens, targets, positions)),
            offsets=torch.tensor(bounds, dtype=torch.int32) if self.order.capacity else None,
            learnt=int((targets != IGNORE).sum()),
            real=sum(map(self.size, rows)),
        )
