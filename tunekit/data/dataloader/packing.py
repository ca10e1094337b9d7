"""Which documents share a packed row: planned from their lengths before anything is batched."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Lengths that a row is filled from, spread over all that are left. More of them fill single rows no better and leave
# worse lengths to the last rows: 1,800 rows of 42 to 80 tokens go into 374 of 256 with 16, which is the least there
# can be, into 379 with 32, and into 402 by best fit of one document after the other.
CHOICES = 16


class PackingPlan(NamedTuple):
    """Rows of documents, held flat: row i has `documents[bounds[i] : bounds[i + 1]]`."""

    documents: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, first: int, last: int) -> list[np.ndarray]:
        """Documents of each row from `first` to before `last`."""
        return [self.documents[start:end] for start, end in zip(*self.ends(first, last), strict=True)]

    def ends(self, first: int, last: int) -> tuple[list[int], list[int]]:
        bounds = self.bounds[first : min(last, len(self)) + 1].tolist()
        return bounds[:-1], bounds[1:]

    def taken(self, order: np.ndarray) -> "PackingPlan":
        """The same rows in another order."""
        sizes = np.diff(self.bounds)[order]
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        places = np.arange(bounds[-1]) + np.repeat(self.bounds[:-1][order] - bounds[:-1], sizes)
        return PackingPlan(self.documents[places], bounds)


def pack_rows(lengths: np.ndarray, capacity: int) -> PackingPlan:
    """Rows of at most `capacity` tokens: each the longest document left and what fills the rest of the row best.

    No document is split, so none may be longer than `capacity`. Which lengths share a row depends on all lengths and
    not on their order; of documents of one length, the first are used first. Nothing that is left fits into a row that
    is closed, so no two rows could be one.
    """
    assert len(lengths) == 0 or lengths.max() <= capacity
    order = np.argsort(lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    starts = dict(zip(values.tolist(), np.cumsum(counts) - counts, strict=True))
    documents, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for fill, times in fills(dict(zip(values.tolist(), counts.tolist(), strict=True)), capacity):
        columns = []
        for length, each in fill.items():
            first = starts[length]
            starts[length] = last = first + each * times
            columns.append(order[first:last].reshape(times, each))
        rows = np.concatenate(columns, axis=1)
        documents.append(rows.ravel())
        sizes.append(np.full(times, rows.shape[1]))
    return PackingPlan(np.concatenate(documents), np.concatenate(([0], np.cumsum(np.concatenate(sizes)))))


def fills(left: dict[int, int], capacity: int) -> Iterator[tuple[dict[int, int], int]]:
    """How many documents of each length fill a row, and how many rows are filled so, until all of `left` are used.

    `left`: documents of each length, shortest first. Rows alike are planned at once, so the time depends on how many
    lengths there are, and hardly on how many documents.
    """
    lengths = list(left)
    while lengths:
        longest = lengths[-1]
        fill, room = {longest: 1}, capacity - longest
        left[longest] -= 1
        while found := filled(left, candidates(lengths, left, room), room):
            for length, each in found.items():
                fill[length] = fill.get(length, 0) + each
                left[length] -= each
                room -= each * length
        times = 1 + min(left[length] // each for length, each in fill.items())
        for length, each in fill.items():
            left[length] -= each * (times - 1)
            if not left[length]:
                lengths.remove(length)
        yield fill, times


def candidates(lengths: list[int], left: dict[int, int], room: int) -> list[int]:
    """At most CHOICES of the lengths that are left and fit into the room."""
    fitting = lengths[: bisect_right(lengths, room)]
    while fitting and not left[fitting[-1]]:
        fitting.pop()
    if len(fitting) > CHOICES:
        fitting = [fitting[i * (len(fitting) - 1) // (CHOICES - 1)] for i in range(CHOICES)]
    return [length for length in fitting if left[length]]


def filled(left: dict[int, int], lengths: list[int], room: int) -> dict[int, int]:
    """How many of each length come nearest to the room, long ones before short ones.

    Bit s of `sums[i]` says whether documents of the first i lengths can have s tokens together.
    """
    sums, mask = [1], (2 << room) - 1
    for length in lengths:
        bits, copies, step = sums[-1], min(left[length], room // length), 1
        while copies:  # 1, 2, 4, ... and the rest give every number of copies
            step = min(step, copies)
            bits |= (bits << length * step) & mask
            copies, step = copies - step, 2 * step
        sums.append(bits)
    tokens, found = sums[-1].bit_length() - 1, {}
    for length, bits in zip(reversed(lengths), reversed(sums[:-1]), strict=True):
        each = min(left[length], tokens // length)
        while not bits >> (tokens - each * length) & 1:
            each -= 1
        if each:
            found[length] = each
            tokens -= each * length
    return found
