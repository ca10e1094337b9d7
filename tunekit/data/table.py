"""A row that knows where it came from, and rows that know how many they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One object of a data set; `where` is its file and line, for messages about it."""

    where: str
    fields: dict[str, Any]


class Fault(NamedTuple):
    """A row that cannot be read or learnt from, and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class Table:
    """Rows to be read once, in order. The count is known before: slices in percent and progress bars need it."""

    count: int
    rows: Iterator[Row]
