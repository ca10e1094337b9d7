"""Hub names and layouts to ours and back: one table a family, read in either direction.

A row pairs modules, not tensors, so weights, biases and adapters of a module follow it:
`Row("layers.{}.attn", "model.layers.{}.self_attn")` also maps `...self_attn.q_proj.lora_A.weight`.
`{}` is the number of a layer. The first row that matches a name wins; a name without a row has no place here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from torch import Tensor


@dataclass(frozen=True)
class Same:
    """The tensors are the same on both sides."""

    def load(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


@dataclass(frozen=True)
class Row:
    """One module here, one there, and what happens to its tensors on the way."""

    ours: str
    hub: str
    op: Same = Same()


@dataclass(frozen=True)
class Move:
    """Tensors that are read or written together. Moves are made one at a time, so that no second model is in memory."""

    ours: tuple[str, ...]
    hub: tuple[str, ...]
    op: Same


@cache
def pattern(side: str) -> re.Pattern[str]:
    return re.compile(re.escape(side).replace(r"\{\}", r"(\d+)") + r"(\..+)?")


def translate(name: str, source: str, target: str) -> str | None:
    """`name` under its other side's module, or None if it is no tensor of the `source` module."""
    found = pattern(source).fullmatch(name)
    if found is None:
        return None
    *index, tail = found.groups()
    return target.format(*index) + (tail or "")


def moves_in(names: Iterable[str], table: tuple[Row, ...]) -> tuple[list[Move], list[str]]:
    """How the tensors of a checkpoint come in, and the names for which the table has no row."""
    moves, unknown = [], []
    for name in names:
        found = ((translate(name, row.hub, row.ours), row.op) for row in table)
        ours, op = next(((mine, op) for mine, op in found if mine is not None), (None, None))
        if ours is None or op is None:
            unknown.append(name)
        else:
            moves.append(Move((ours,), (name,), op))
    return moves, unknown


def moves_out(names: Iterable[str], table: tuple[Row, ...]) -> list[Move]:
    """How our tensors go out. Each has a row, for we named them."""
    moves = []
    for name in names:
        found = ((translate(name, row.ours, row.hub), row.op) for row in table)
        hub, op = next((theirs, op) for theirs, op in found if theirs is not None)
        moves.append(Move((name,), (hub,), op))
    return moves


def hub_name(name: str, table: tuple[Row, ...]) -> str:
    """The Hub's name of one of our tensors or modules."""
    return moves_out([name], table)[0].hub[0]
