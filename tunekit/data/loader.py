"""Step number to micro-batches: no state to save, the same rows whatever the ranks and the micro-batch."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from tunekit.data.batch import Batch, Layout
from tunekit.data.documents import Document, Documents
from tunekit.data.order import Order, Steps
from tunekit.data.rows import Rows
from tunekit.data.source import open_source
from tunekit.data.table import Fault, Table
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

CHUNK = 512  # rows that become tokens together


def load(choice: Rows, tokenizer: Tokenizer, batch: int, micro_batch: int, run, folder: Path | None = None) -> "Loader":
    """Read and tokenise all rows; UserError names the first that cannot be learnt from. Rank 0 shows a bar."""
    tokenizer = choice.prepare(tokenizer)
    table = open_source(choice.source, choice.split, choice.limit)
    bar = tqdm(total=table.count, desc="preparing", unit=" rows", disable=not run.is_main or None, leave=False)
    with bar:
        documents = Documents(prepared(choice, tokenizer, table, bar))
    capacity = choice.length if choice.pack else None
    order = Order(documents.lengths, run.seed, choice.shuffle, capacity)
    return Loader(documents, order, Layout(batch, micro_batch, run.rank, run.size, tokenizer.pad, capacity))


def prepared(choice: Rows, tokenizer: Tokenizer, table: Table, bar: tqdm) -> Iterator[Document]:
    rows = table.rows
    while chunk := list(islice(rows, CHUNK)):
        for found in choice.encode(tokenizer, chunk):
            if isinstance(found, Fault):
                raise UserError(f"{found.where}: {found.reason}")
            yield from found or ()
        bar.update(len(chunk))


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

    def __init__(self, documents: Documents, order: Order, layout: Layout) -> None:
        assert layout.batch > 0 and layout.micro_batch > 0 and len(documents) > 0
        self.rows, self.order, self.layout = documents, order, layout
        self.place = Steps(order.rows, layout.batch)

    def steps(self, epochs: int) -> int:
        """How many steps so many epochs have."""
        return self.place.until(epochs)

    def check(self, vocab: int) -> None:
        """UserError if the model has no embedding for a token."""
        highest = max(int(self.rows.tokens.max()), self.layout.pad)
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
        packed = None if capacity is None else self.order.rows(0)
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
        epoch, at = self.place.find(step)
        first = at * self.layout.batch
        return self.layout.batches(self.rows, self.order.plan(epoch).rows(first, first + self.layout.batch))
