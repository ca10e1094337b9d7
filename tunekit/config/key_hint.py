"""A row of the tables with replacements for keys of other trainers."""

from typing import NamedTuple

Key = str  # a dotted key, as in an override


class KeyHint(NamedTuple):
    """A row of `TABLE`. If several rows have the same name, the first that applies to the recipe is used.

    A row applies if the recipe has the keys `key` and `where`; a row with an empty `key` applies to every recipe.
    """

    names: str  # separated by spaces; `section.key` matches in this section only
    key: Key
    note: str = ""  # difference in meaning or usage
    where: Key | None = None
