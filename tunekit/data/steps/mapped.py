"""Step number to micro-batches of rows that are prepared: the same rows whatever the ranks and the micro-batch."""

from typing import Any

import numpy as np

from tunekit.data.prepared.documents import Document, Documents, Prepared
from tunekit.data.steps import prefix
from tunekit.data.steps.batch import Batch, Layout
from tunekit.data.steps.mix import Draw, Joined, Mixed
from tunekit.data.steps.order import Order, Steps, documents, units
from tunekit.data.steps.report import Report, Share
from tunekit.data.steps.served import Loader
from tunekit.errors import UserError


class Mapped(Loader):
    """Steps go on over epochs; the last of an epoch may be smaller. There is no state: `[step]` is a pure function.

    `rows` are the documents of all parts, numbered through; `mix.each` of them that follow each other are never torn.
    """

    def __init__(self, mix: Mixed, parts: tuple[Documents, ...], layout: Layout, seed: int) -> None:
        assert layout.batch > 0 and layout.micro_batch > 0
        self.mix, self.parts, self.layout = mix, parts, layout
        self.rows: Documents | Joined = parts[0] if len(parts) == 1 else Joined(parts)
        for rows, part in zip(mix.sources, parts, strict=True):
            if not len(part):
                raise UserError(f"{rows.source}: {rows.split} holds no row to learn from")
        self.sizes = sizes = [len(part) // mix.each for part in parts]
        self.counts = list(mix.counts(sizes))
        draw = None if self.counts == sizes else Draw(sizes, self.counts, seed, mix.shuffle)
        self.order = Order(units(self.rows.lengths, mix.each), seed, mix.shuffle, mix.capacity, draw)
        self.place = Steps(self.order.rows, layout.batch)

    def replan(self) -> None:
        self.order = self.order.shortened(prefix.saved(self.rows, self.mix.each))
        self.place = Steps(self.order.rows, self.layout.batch)

    def steps(self, epochs: int) -> int:
        """How many steps so many epochs have."""
        return self.place.until(epochs)

    def check(self, vocab: int) -> None:
        """UserError if the model has no embedding for a token."""
        highest = max(self.layout.pad, *(int(part.tokens.max()) for part in self.parts))
        if highest >= vocab:
            raise UserError(
                f"the rows hold token {highest}, the model knows {vocab}: this tokenizer is another model's"
            )

    @property
    def digest(self) -> str:
        """Of all that is prepared."""
        return self.rows.digest

    def sample(self, count: int) -> list[tuple[str, Document]]:
        """Some documents of the first step, and where they are from."""
        numbers = [int(number) for row in self.numbers(0) for number in row][:count]
        return [(self.rows.where(number), self.rows[number]) for number in numbers]

    def state(self, step: int) -> dict[str, Any]:
        """What the rows are, so that a run does not go on with others. Everything else follows from the step."""
        return {"rows": self.rows.digest}

    def restore(self, state: dict[str, Any]) -> None:
        if state != self.state(0):
            raise UserError("data: these are not the rows that the run began with: bring them back, or use --fresh")

    def close(self) -> None:
        """Nothing is under way."""

    @property
    def report(self) -> Report:
        """What an epoch holds."""
        drawn = self.order.drawn(0)
        part_of = np.repeat(np.arange(len(self.parts)), self.sizes)[drawn]
        tokens = np.bincount(part_of, self.order.lengths[drawn], len(self.parts)).astype(int).tolist()
        columns = zip(self.mix.sources, self.parts, self.sizes, self.counts, tokens, strict=True)
        shares = [
            Share(
                name=rows.source,
                about=about(part, count == size),
                rows=count,
                tokens=each,
                learnt=learnt(part, count / size),
                passes=count / size,
                noun="document" if part.prepared.split else "row",
            )
            for rows, part, size, count, each in columns
        ]
        packed = None if self.mix.capacity is None else self.order.rows(0)
        longest, truncated = int(self.rows.lengths.max()), sum(part.truncated for part in self.parts)
        return Report(tuple(shares), longest, truncated, packed, self.mix.capacity)

    def __getitem__(self, step: int) -> list[Batch]:
        return self.layout.batches(self.rows, self.numbers(step))

    def numbers(self, step: int) -> list[np.ndarray]:
        """The documents of each row of a step."""
        if step < 0:
            raise IndexError(step)
        epoch, at = self.place.find(step)
        first = at * self.layout.batch
        return documents(self.order.plan(epoch).rows(first, first + self.layout.batch), self.mix.each)

    def where(self, step: int) -> list[str]:
        return [self.rows.where(int(number)) for row in self.numbers(step) for number in row]


def learnt(part: Documents, passes: float) -> int:
    """Tokens that so many passes teach."""
    return round(part.targets * passes)


def about(part: Documents, once: bool, skipped: str = "skipped") -> str:
    """What the rows are; how many, and what became of those that are no documents, where that is not told beside it."""
    found = part.prepared
    told = once and found == Prepared(rows=found.rows, form=found.form)
    return found.form if told and found.form else ", ".join(filter(None, (found.form, found.told(skipped))))
