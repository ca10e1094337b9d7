"""Hub names and layouts to ours and back: one table a family, read in either direction.

A row pairs modules, not tensors, so weights, biases and adapters of a module follow it:
`Row("layers.{}.attn", "model.layers.{}.self_attn")` also maps `...self_attn.q_proj.lora_A.weight`.
`{}` is the number of a layer and `*`, there only, that of an expert. The first row that matches a name wins; a name
without a row has no place here. Several rows may lead to one of ours: a checkpoint is written in the layout it had.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Identity:
    """The tensors are the same on both sides.

    An op is these two methods. `load` takes the tensors of the Hub, in the order of the row and of the experts, and
    the shapes of ours; `save` takes ours. Views are welcome. Both must work on tensors of any device, meta too: the
    shapes that a checkpoint must have are those that `save` makes.
    """

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return tensors

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


@dataclass(frozen=True)
class HubOnly(Identity):
    """There only: never loaded, and copied as it is when the checkpoint is written back. `ours` is `()`."""


@dataclass(frozen=True)
class Stack(Identity):
    """One tensor for each expert there; here one, with the experts along a new first axis."""

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [torch.stack(tensors)]

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind())


@dataclass(frozen=True)
class Fused(Identity):
    """One tensor there; here its parts along `dim`, one after the other or row by row in turns.

    `transposed`: the last two axes are swapped there. `dim` is counted in our layout.
    """

    dim: int = 0
    interleaved: bool = False
    transposed: bool = False

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        fused = tensors[0].mT if self.transposed else tensors[0]
        if self.interleaved:
            return list(fused.unflatten(self.dim, (-1, len(shapes))).unbind(self.dim + 1))
        return list(fused.split([shape[self.dim] for shape in shapes], dim=self.dim))

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.interleaved:
            fused = torch.stack(tensors, self.dim + 1).flatten(self.dim, self.dim + 1)
        else:
            fused = torch.cat(tensors, self.dim)
        return [fused.mT if self.transposed else fused]


@dataclass(frozen=True)
class Transposed(Identity):
    """The last two axes are swapped."""

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [tensor.mT for tensor in tensors]

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.mT for tensor in tensors]


@dataclass(frozen=True)
class KeyRule:
    """Modules or tensors here, those there, and what happens on the way. A name may stand for itself or in a tuple."""

    ours: str | tuple[str, ...]
    hub: str | tuple[str, ...]
    op: Identity = Identity()


@dataclass(frozen=True)
class KeyMatch:
    """The row that a name belongs to, and what the name says beyond it."""

    rule: KeyRule
    index: tuple[str, ...]  # numbers of layers
    tail: str  # ".weight", ".lora_A.weight", or nothing for a module
    position: int  # which of the row's names on its side it is
    expert: int | None = None

    @property
    def ours(self) -> tuple[str, ...]:
        """All our names of the row."""
        return self.names(self.rule.ours)

    @property
    def hub(self) -> tuple[str, ...]:
        """All the Hub's names of the row; `*` stands for the number of an expert."""
        return self.names(self.rule.hub)

    def names(self, side: str | tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.format(*self.index) + self.tail for name in as_tuple(side))


@dataclass(frozen=True)
class KeyMapping:
    """Tensors that are read or written together. Moves are made one at a time, so that no second model is in memory."""

    ours: tuple[str, ...]
    hub: tuple[str, ...]
    op: Identity

    def load(self, tensors: list[Tensor], shapes: Mapping[str, Shape]) -> list[Tensor]:
        """Our tensors from the Hub's. `shapes` are those of the model."""
        return self.op.load(tensors, [shapes[name] for name in self.ours])

    def hub_shapes(self, shapes: Mapping[str, Shape]) -> list[Shape]:
        """What the Hub's tensors look like when ours have these shapes."""
        return [tuple(t.shape) for t in self.op.save([torch.empty(shapes[name], device="meta") for name in self.ours])]


def as_tuple(side: str | tuple[str, ...]) -> tuple[str, ...]:
    return (side,) if isinstance(side, str) else side


@cache
def pattern(name: str) -> re.Pattern[str]:
    number = "(?:0|[1-9][0-9]*)"
    text = re.escape(name).replace(r"\{\}", f"({number})").replace(r"\*", f"(?P<expert>{number})")
    return re.compile(text + r"(?P<tail>(?:\..+)?)")


def match_rule(name: str, rule: KeyRule, side: str | tuple[str, ...]) -> KeyMatch | None:
    for position, candidate in enumerate(as_tuple(side)):
        if match := pattern(candidate).fullmatch(name):
            groups = match.groupdict()
            index = tuple(g for i, g in enumerate(match.groups(), 1) if i not in match.re.groupindex.values())
            expert = groups.get("expert")
            return KeyMatch(rule, index, groups["tail"], position, None if expert is None else int(expert))
    return None


def match_hub_name(name: str, table: tuple[KeyRule, ...]) -> KeyMatch | None:
    """The row of a tensor or module of the Hub.

    Some rows speak of single tensors: ask for a module by the name of its weight.
    """
    return next((match for row in table if (match := match_rule(name, row, row.hub))), None)


def match_name(name: str, table: tuple[KeyRule, ...]) -> KeyMatch:
    """The row of one of our tensors or modules. Each has one, for we named them."""
    found = next((match for row in table if (match := match_rule(name, row, row.ours))), None)
    assert found is not None, f"the table has no row for {name}"
    return found


def expand_experts(names: tuple[str, ...], experts: int) -> tuple[str, ...]:
    """Names with every expert in place of `*`, one name after the other."""
    return tuple(n.replace("*", str(e)) for n in names for e in range(experts if "*" in n else 1))


def load_mappings(names: Iterable[str], table: tuple[KeyRule, ...]) -> tuple[list[KeyMapping], list[str]]:
    """How the tensors of a checkpoint come in, and the names for which the table has no row.

    A move asks for all tensors of its row, so where one is missing it names one that is not in `names`.
    """
    groups: dict[tuple[KeyRule, tuple[str, ...], str], list[KeyMatch]] = {}
    unknown = []
    for name in names:
        match = match_hub_name(name, table)
        if match is None:
            unknown.append(name)
        else:
            groups.setdefault((match.rule, match.index, match.tail), []).append(match)
    return [join_mappings(group) for group in groups.values()], unknown


def join_mappings(group: list[KeyMatch]) -> KeyMapping:
    """One move of tensors that differ in their expert or their place in the row.

    It has as many experts as there are different numbers: where one is left out, a smaller one is missing.
    """
    first, experts = group[0], len({match.expert for match in group})
    return KeyMapping(first.ours, expand_experts(first.hub, experts), first.rule.op)


def save_mappings(shapes: Mapping[str, Shape], table: tuple[KeyRule, ...]) -> list[KeyMapping]:
    """How our tensors go out where no checkpoint says it: by the first row of each."""
    mappings: dict[KeyMapping, None] = {}
    for name, shape in shapes.items():
        match = match_name(name, table)
        mappings[KeyMapping(match.ours, expand_experts(match.hub, shape[0] if shape else 0), match.rule.op)] = None
    return list(mappings)


def to_hub_name(name: str, table: tuple[KeyRule, ...]) -> str:
    """The Hub's name of one of our tensors or modules: of what it is a part of, and `*` for all experts."""
    return match_name(name, table).hub[0]


def with_prefix(prefix: str, table: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """A table whose `model.` is `prefix` instead: where the text model is a part of a larger one."""

    def replace_prefix(name: str) -> str:
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    return tuple(KeyRule(row.ours, tuple(map(replace_prefix, as_tuple(row.hub))), row.op) for row in table)
