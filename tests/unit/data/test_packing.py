"""Packing plans contain every document once, split none, and waste few tokens."""

import json
import time
from itertools import product
from operator import mul

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit import assets
from tunekit.data.dataloader.packing import PackingPlan, best_fill, pack_rows
from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer


@given(st.data())
def test_every_document_is_in_one_row_within_capacity(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 300))
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=60)), np.int64)
    plan = pack_rows(lengths, capacity)
    rows = plan.rows(0, len(plan))
    assert sorted(plan.documents.tolist()) == list(range(len(lengths)))
    assert all(0 < lengths[row].sum() <= capacity for row in rows)
    # First fit: no document of a later row fits into an earlier one, so no two rows can be merged.
    sizes = sorted(lengths[row].sum() for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > capacity
    order = np.array(data.draw(st.permutations(range(len(lengths)))), np.int64)
    other = pack_rows(lengths[order], capacity)
    assert row_lengths(lengths[order], other) == row_lengths(lengths, plan), "independent of the order of documents"


def row_lengths(lengths: np.ndarray, plan: PackingPlan) -> list[list[int]]:
    """Sorted lengths in each row, of all rows."""
    return sorted(sorted(lengths[row].tolist()) for row in plan.rows(0, len(plan)))


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 5), max_size=7), st.integers(0, 90))
def test_filled_row_is_optimal(left: dict[int, int], capacity: int) -> None:
    """Compare with all combinations."""
    lengths = sorted(left)
    counts = best_fill(left, lengths, capacity)
    assert all(count <= left[length] for length, count in counts.items())
    choices = product(*(range(left[length] + 1) for length in lengths))
    sums = (sum(map(mul, choice, lengths)) for choice in choices)
    assert sum(map(mul, counts.values(), counts)) == max(tokens for tokens in sums if tokens <= capacity)


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(9, 20))
def test_number_of_rows_is_near_the_minimum(lengths: list[int], capacity: int) -> None:
    """All rows except one are at least half full, because two rows together exceed the capacity."""
    min_rows = -(-sum(lengths) // capacity)
    assert min_rows <= len(pack_rows(np.array(lengths, np.int64), capacity)) <= max(2 * min_rows - 1, 0)


def test_reordered_plan_has_the_same_rows() -> None:
    plan = pack_rows(np.random.default_rng(0).integers(1, 50, 200), 100)
    order = np.random.default_rng(1).permutation(len(plan))
    other = plan.reorder(order)
    assert [row.tolist() for row in other.rows(0, len(other))] == [plan.rows(i, i + 1)[0].tolist() for i in order]
    assert other.rows(3, 3) == []


LENGTHS = {
    "chats of 4,096 tokens at most": (np.random.default_rng(0).lognormal(5.5, 1.0, 100_000), 4096, 0.999),
    "longer chats": (np.random.default_rng(0).lognormal(7.5, 0.7, 30_000), 4096, 0.99),
    "the same in rows twice as long": (np.random.default_rng(0).lognormal(7.5, 0.7, 30_000), 8192, 0.99),
    "a thousand": (np.random.default_rng(0).lognormal(6.5, 1.0, 1000), 8192, 0.98),
    # Best fit, one document after the other, fills 93% of these rows.
    "short ones of like length": (np.random.default_rng(0).integers(35, 81, 1800), 256, 0.98),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_rows_are_filled_to_the_given_fraction(name: str) -> None:
    sampled, capacity, min_filled = LENGTHS[name]
    lengths = np.minimum(sampled.astype(np.int64) + 1, 4096)
    plan = pack_rows(lengths, capacity)
    assert lengths.sum() / (len(plan) * capacity) > min_filled
    assert len(np.unique(plan.documents)) == len(lengths)


def test_bundled_rows_are_packed_optimally() -> None:
    tokenizer = Tokenizer.open(assets.model_dir("tunekit/nano"))
    source = ChatDataset("tunekit/tools", max_length=256)
    lines = assets.DATA["tunekit/tools"].joinpath("train.jsonl").read_text("utf-8").splitlines()
    rows = [Row(f"row {number}", json.loads(line)) for number, line in enumerate(lines)]
    lengths = np.array(
        [len(document.tokens) for documents in source.encode_rows(tokenizer, rows) for document in documents]
    )
    assert len(pack_rows(lengths, 256)) == -(-lengths.sum() // 256), "the minimum"


@pytest.mark.slow
def test_a_million_documents_are_packed_in_seconds() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.5, 1.0, 1_000_000).astype(np.int64) + 1, 4096)
    start = time.process_time()
    plan = pack_rows(lengths, 4096)
    assert time.process_time() - start < 15
    assert lengths.sum() / (len(plan) * 4096) > 0.99
