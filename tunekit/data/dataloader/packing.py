"""Sequence packing: which documents share a row, planned from their lengths before any batch is built."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# Number of candidate lengths to fill a row from, spread over all remaining lengths. More candidates fill single rows
# no better and leave worse lengths for the last rows: 1,800 documents of 42 to 80 tokens need 374 rows of 256 tokens
# with 16 candidates (the minimum), 379 with 32, and 402 with best fit of one document after the other.
NUM_CANDIDATES = 16


class PackingPlan(NamedTuple):
    """Rows of documents in flat form: row i has `documents[bounds[i] : bounds[i + 1]]`."""

    documents: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, first: int, last: int) -> list[np.ndarray]:
        """Documents of the rows from `first` to before `last`."""
        bounds = self.bounds[first : min(last, len(self)) + 1].tolist()
        return [self.documents[start:end] for start, end in pairwise(bounds)]

    def reorder(self, order: np.ndarray) -> "PackingPlan":
        """Same rows in another order."""
        sizes = np.diff(self.bounds)[order]
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        indices = np.arange(bounds[-1]) + np.repeat(self.bounds[:-1][order] - bounds[:-1], sizes)
        return PackingPlan(self.documents[indices], bounds)


def pack_rows(lengths: np.ndarray, capacity: int) -> PackingPlan:
    """Pack documents into rows of at most `capacity` tokens: each the longest one left and what best fills the rest.

    Documents are not split, so none may be longer than `capacity`. The lengths that share a row depend on all lengths
    but not on their order; of documents of equal length, the first are used first. No remaining document fits into a
    finished row, so no two rows could be merged.
    """
    assert len(lengths) == 0 or lengths.max() <= capacity
    order = np.argsort(lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    starts = dict(zip(values.tolist(), np.cumsum(counts) - counts, strict=True))
    documents, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for fill, num_rows in iter_fills(dict(zip(values.tolist(), counts.tolist(), strict=True)), capacity):
        columns = []
        for length, copies in fill.items():
            first = starts[length]
            starts[length] = last = first + copies * num_rows
            columns.append(order[first:last].reshape(num_rows, copies))
        rows = np.concatenate(columns, axis=1)
        documents.append(rows.ravel())
        sizes.append(np.full(num_rows, rows.shape[1]))
    return PackingPlan(np.concatenate(documents), np.concatenate(([0], np.cumsum(np.concatenate(sizes)))))


def iter_fills(counts: dict[int, int], capacity: int) -> Iterator[tuple[dict[int, int], int]]:
    """Number of documents of each length in a row, and number of rows like it, until all documents are used.

    `counts` is the number of documents of each length, shortest first, and is used up. Equal rows are planned at once,
    so the time depends on the number of distinct lengths and hardly on the number of documents.
    """
    lengths = list(counts)
    while lengths:
        longest = lengths[-1]
        fill, space = {longest: 1}, capacity - longest
        counts[longest] -= 1
        while added := best_fill(counts, candidate_lengths(lengths, counts, space), space):
            for length, copies in added.items():
                fill[length] = fill.get(length, 0) + copies
                counts[length] -= copies
                space -= copies * length
        num_rows = 1 + min(counts[length] // copies for length, copies in fill.items())
        for length, copies in fill.items():
            counts[length] -= copies * (num_rows - 1)
            if not counts[length]:
                lengths.remove(length)
        yield fill, num_rows


def candidate_lengths(lengths: list[int], counts: dict[int, int], space: int) -> list[int]:
    """At most NUM_CANDIDATES of the remaining lengths that fit into `space` tokens."""
    fitting = lengths[: bisect_right(lengths, space)]
    while fitting and not counts[fitting[-1]]:
        fitting.pop()
    if len(fitting) > NUM_CANDIDATES:
        fitting = [fitting[i * (len(fitting) - 1) // (NUM_CANDIDATES - 1)] for i in range(NUM_CANDIDATES)]
    return [length for length in fitting if counts[length]]


def best_fill(counts: dict[int, int], lengths: list[int], space: int) -> dict[int, int]:
    """Number of documents of each length that together come closest to `space` tokens; prefers long documents.

    Subset sum with bit sets: bit s of `sums[i]` is set if documents of the first i lengths can have s tokens together.
    """
    sums, mask = [1], (2 << space) - 1
    for length in lengths:
        bits, copies, step = sums[-1], min(counts[length], space // length), 1
        while copies:  # groups of 1, 2, 4, ... and the remainder give every number of copies
            step = min(step, copies)
            bits |= (bits << length * step) & mask
            copies, step = copies - step, 2 * step
        sums.append(bits)
    tokens, fill = sums[-1].bit_length() - 1, {}
    for length, bits in zip(reversed(lengths), reversed(sums[:-1]), strict=True):
        copies = min(counts[length], tokens // length)
        while not bits >> (tokens - copies * length) & 1:
            copies -= 1
        if copies:
            fill[length] = copies
            tokens -= copies * length
    return fill
