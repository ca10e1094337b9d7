"""Pairwise parametrization: every pair of values of two parameters occurs in some case, but not every combination."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def cover_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices below `sizes` that contain all pairs of indices of two columns."""
    columns = range(len(sizes))
    missing = {((a, i), (b, j)) for a, b in combinations(columns, 2) for i in range(sizes[a]) for j in range(sizes[b])}
    rows = []
    while missing:
        row = dict(min(missing))
        for column in columns:
            if column not in row:
                new_pairs = [
                    sum(tuple(sorted(((column, i), item))) in missing for item in row.items())
                    for i in range(sizes[column])
                ]
                row[column] = new_pairs.index(max(new_pairs))
        rows.append(tuple(row[column] for column in columns))
        missing -= set(combinations(sorted(row.items()), 2))
    return rows


def label_of(value: Any) -> str:
    """Name of a function or class; any other value as text."""
    return getattr(value, "__name__", str(value))


def pairwise(indirect: Sequence[str] = (), **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with the values of each parameter. Keys of mappings are the ids of their values."""
    labeled = {
        name: [*values.items()]
        if isinstance(values, Mapping)
        else [(getattr(value, "__name__", str(value)), value) for value in values]
        for name, values in axes.items()
    }
    by_size = sorted(labeled, key=lambda name: -len(labeled[name]))  # large columns first need fewer rows
    cases = []
    for row in cover_pairs([len(labeled[name]) for name in by_size]):
        chosen = {name: labeled[name][i] for name, i in zip(by_size, row, strict=True)}
        label = "-".join(str(chosen[name][0]) for name in axes)
        cases.append(pytest.param(*(chosen[name][1] for name in axes), id=label))
    return pytest.mark.parametrize(tuple(axes), cases, indirect=list(indirect))
