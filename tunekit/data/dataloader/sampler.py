"""Rows of an epoch and their order: a pure function of (seed, epoch)."""

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from tunekit.data.dataloader.packing import PackingPlan, pack_rows

Sampler = Callable[[int], np.ndarray]


class RowOrder:
    """Packed or single rows of all epochs.

    Items are dataset rows: documents, or groups of documents that are never separated, such as pairs. `lengths` are
    their tokens. `sampler(epoch)` returns the items of an epoch, possibly some of them twice; None: each item once.
    `capacity` is the tokens of a packed row; None: each item is a row.
    """

    def __init__(
        self, lengths: np.ndarray, seed: int, shuffle: bool, capacity: int | None, sampler: Sampler | None = None
    ) -> None:
        self.lengths, self.seed, self.shuffle, self.capacity, self.sampler = lengths, seed, shuffle, capacity, sampler
        self.plan = lru_cache(maxsize=2)(self.plan_epoch)  # the next epoch is planned before the current one ends

    def items(self, epoch: int) -> np.ndarray:
        """Items of an epoch, not shuffled."""
        return np.arange(len(self.lengths)) if self.sampler is None else self.sampler(epoch)

    def plan_epoch(self, epoch: int) -> PackingPlan:
        """Rows of an epoch in their order."""
        return plan_rows(self.lengths, self.items(epoch), self.capacity, (self.seed, epoch) if self.shuffle else None)

    def num_rows(self, epoch: int) -> int:
        """Number of rows of an epoch. The same for all epochs if all have the same items."""
        return len(self.plan(0 if self.sampler is None else epoch))


class StepIndex:
    """Maps steps to epochs. An epoch of `num_rows(epoch)` rows has one step for each `batch_size` of them."""

    def __init__(self, num_rows: Callable[[int], int], batch_size: int) -> None:
        self.num_rows, self.batch_size = num_rows, batch_size
        self.ends: list[int] = []

    def num_steps(self, epochs: int) -> int:
        """Number of steps of the first `epochs` epochs."""
        while len(self.ends) < epochs:
            steps = -(-self.num_rows(len(self.ends)) // self.batch_size)
            self.ends.append(steps + (self.ends[-1] if self.ends else 0))
        return self.ends[epochs - 1] if epochs else 0

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch of a step, and index of the step in it."""
        while not self.ends or self.ends[-1] <= step:
            self.num_steps(len(self.ends) + 1)
        epoch = bisect_right(self.ends, step)
        return epoch, step - self.num_steps(epoch)


def plan_rows(
    lengths: np.ndarray, items: np.ndarray, capacity: int | None, seed: tuple[int, ...] | None
) -> PackingPlan:
    """Rows of `items`, in an order drawn from `seed`; without a seed, in the order of the first item of each row."""
    rng = None if seed is None else np.random.default_rng([number % 2**32 for number in seed])
    items = items if rng is None else rng.permutation(items)
    if capacity is None:
        return PackingPlan(items, np.arange(len(items) + 1))
    packed = pack_rows(lengths[items], capacity)
    if rng is None:
        order = np.argsort(np.minimum.reduceat(packed.documents, packed.bounds[:-1]), kind="stable")
    else:
        order = rng.permutation(len(packed))
    packed = packed.reorder(order)
    return PackingPlan(items[packed.documents], packed.bounds)


def unit_documents(rows: list[np.ndarray], docs_per_row: int) -> list[np.ndarray]:
    """Document indices of rows of group indices."""
    return [(row[:, None] * docs_per_row + np.arange(docs_per_row)).ravel() for row in rows]
