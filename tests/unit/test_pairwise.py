"""Pairwise parametrization of tests."""

from itertools import combinations
from math import prod

import pytest

from tests.helpers.pairwise import cover_pairs, pairwise


@pytest.mark.parametrize("sizes", [(4, 8, 4, 2), (3, 3, 8, 2, 2), (2, 2), (5, 1, 3), (1, 1, 1), (39, 3, 2)], ids=str)
def test_rows_contain_all_pairs_without_duplicates(sizes: tuple[int, ...]) -> None:
    rows = cover_pairs(sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == {(i, j) for i in range(sizes[a]) for j in range(sizes[b])}
    assert len(set(rows)) == len(rows) <= prod(sizes)


def test_few_rows_are_needed() -> None:
    """The two largest columns alone need 32 rows; all combinations would be 256."""
    assert len(cover_pairs((8, 4, 4, 2))) <= 40


def test_mapping_keys_are_ids() -> None:
    mark = pairwise(dtype=("fp32", "bf16"), size={"small": 1, "large": 2})
    names, cases = mark.args
    assert names == ("dtype", "size")
    assert {case.id: case.values for case in cases}["bf16-large"] == ("bf16", 2)
