"""Results as tables of pandas."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tunekit.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame


def make_table(rows: Sequence[Mapping[str, Any]], index: list[str]) -> "DataFrame":
    """A table with a column for each name, and some of them as its index. Missing values are NaN."""
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise UserError("pandas is not installed. Tables require it: pip install pandas") from error
    names = list(dict.fromkeys([*index, *(name for row in rows for name in row)]))
    return pandas.DataFrame([dict(row) for row in rows], columns=names).set_index(index)
