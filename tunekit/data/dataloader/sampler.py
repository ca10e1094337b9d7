"""Which documents make up the rows of an epoch, and in which order: a pure function of (seed, epoch)."""

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from tunekit.data.dataloader.packing import PackingPlan, pack_rows

Draw = Callable[[int], np.ndarray]


class RowOrder:
    """Rows of all epochs, of documents or of units that several documents make up, which nothing tears here.

    `draw(epoch)` names those of an epoch, some perhaps twice; None: each once. `capacity` is the tokens of a packed
    row; None: each is a row of its own.
    """

    def __init__(
        self, lengths: np.ndarray, seed: int, shuffle: bool, capacity: int | None, draw: Draw | None = None
    ) -> None:
        self.lengths, self.seed, self.shuffle, self.capacity, self.draw = lengths, seed, shuffle, capacity, draw
        self.plan = lru_cache(maxsize=2)(self.planned)  # the next epoch's is made while this one still goes on

    def shortened(self, saved: np.ndarray) -> "RowOrder":
        """The same of which so many tokens need no room."""
        return RowOrder(self.lengths - saved, self.seed, self.shuffle, self.capacity, self.draw)

    def drawn(self, epoch: int) -> np.ndarray:
        """What an epoch holds."""
        return np.arange(len(self.lengths)) if self.draw is None else self.draw(epoch)

    def planned(self, epoch: int) -> PackingPlan:
        return plan_rows(self.lengths, self.drawn(epoch), self.capacity, (self.seed, epoch) if self.shuffle else None)

    def rows(self, epoch: int) -> int:
        """How many rows an epoch has. Where all hold the same documents, all have as many."""
        return len(self.plan(0 if self.draw is None else epoch))


class StepIndex:
    """Which epoch a step is in, where an epoch of `rows(epoch)` rows has a step for each `batch` of them."""

    def __init__(self, rows: Callable[[int], int], batch: int) -> None:
        self.rows, self.batch = rows, batch
        self.ends: list[int] = []

    def until(self, epochs: int) -> int:
        """Steps of the first so many epochs."""
        while len(self.ends) < epochs:
            steps = -(-self.rows(len(self.ends)) // self.batch)
            self.ends.append(steps + (self.ends[-1] if self.ends else 0))
        return self.ends[epochs - 1] if epochs else 0

    def find(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and which of its steps this is."""
        while not self.ends or self.ends[-1] <= step:
            self.until(len(self.ends) + 1)
        epoch = bisect_right(self.ends, step)
        return epoch, step - self.until(epoch)


def plan_rows(
    lengths: np.ndarray, drawn: np.ndarray, capacity: int | None, seed: tuple[int, ...] | None
) -> PackingPlan:
    """Rows of the documents `drawn`; in an order that the seed draws, else in that of each row's first document."""
    random = None if seed is None else np.random.default_rng([number % 2**32 for number in seed])
    drawn = drawn if random is None else random.permutation(drawn)
    if capacity is None:
        return PackingPlan(drawn, np.arange(len(drawn) + 1))
    packed = pack_rows(lengths[drawn], capacity)
    if random is None:
        order = np.argsort(np.minimum.reduceat(packed.documents, packed.bounds[:-1]), kind="stable")
    else:
        order = random.permutation(len(packed))
    packed = packed.taken(order)
    return PackingPlan(drawn[packed.documents], packed.bounds)


def unit_lengths(lengths: np.ndarray, each: int) -> np.ndarray:
    """Tokens of all units, where `each` documents that follow each other are one."""
    return lengths if each == 1 else lengths.reshape(-1, each).sum(axis=1)


def unit_documents(rows: list[np.ndarray], each: int) -> list[np.ndarray]:
    """The documents of rows of units."""
    return rows if each == 1 else [(row[:, None] * each + np.arange(each)).ravel() for row in rows]
