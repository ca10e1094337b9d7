"""Which documents share a packed row: planned from their lengths before anything is batched."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np


def pack(lengths: np.ndarray, capacity: int, order: Sequence[int] | np.ndarray) -> list[list[int]]:
    """Rows of documents that hold at most `capacity` tokens each: best fit, longest first, equal lengths as in `order`.

    No document is split, so none may be longer than `capacity`. The number of rows does not depend on `order`.
    """
    assert len(order) == 0 or lengths[order].max() <= capacity
    order = np.asarray(order)[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    rows_with: dict[int, list[int]] = defaultdict(list)  # room left -> rows that have it
    rooms = 0  # bit r is set while rows_with[r] is not empty: the least sufficient room is one shift away
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[room].pop()
            rooms ^= 0 if rows_with[room] else 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        if room > length:
            rows_with[room - length].append(row)
            rooms |= 1 << room - length
    return rows
