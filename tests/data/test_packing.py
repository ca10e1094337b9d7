"""A packing plan loses nothing, splits nothing and wastes little."""

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tunekit.data.packing import pack


@given(st.data())
def test_every_document_is_in_one_row_that_holds_it(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 300))
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=60)), np.int64)
    order = np.array(data.draw(st.permutations(range(len(lengths)))), np.int64)
    rows = pack(lengths, capacity, order)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(0 < lengths[row].sum() <= capacity for row in rows)
    # Best fit never opens a row for what an open one holds, so no two rows could be one.
    sizes = sorted(lengths[row].sum() for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > capacity
    assert len(rows) == len(pack(lengths, capacity, np.arange(len(lengths))))


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(40, 80))
def test_the_plan_is_that_of_a_search_through_all_rows(lengths: list[int], capacity: int) -> None:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    sizes = [capacity - room for room in rooms]
    flat = np.array(lengths, np.int64)
    assert sorted(int(flat[row].sum()) for row in pack(flat, capacity, np.arange(len(flat)))) == sorted(sizes)


def test_a_hundred_thousand_rows_are_planned_at_once_and_filled() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(np.int64) + 1, 4096)
    start = time.perf_counter()
    rows = pack(lengths, 4096, np.arange(len(lengths)))
    assert time.perf_counter() - start < 5
    assert lengths.sum() / (len(rows) * 4096) > 0.97
