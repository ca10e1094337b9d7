"""Name and layout mappings between Hub checkpoints and our modules: one table per family, read in both directions.

A rule pairs modules, so that weights, biases and adapters of a module follow it: `KeyRule("layers.{}.attn",
"model.layers.{}.self_attn")` also maps `...self_attn.q_proj.lora_A.weight`. `{}` is a layer index; `*`, in Hub names
only, is an expert index. The first matching rule wins; a tensor without a rule is an error. Several rules may map to
the same module: checkpoints are written in the layout in which they were read.
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
    """Equal tensors on both sides.

    An op has these two methods. `load` takes Hub tensors, in the order of the rule and of the experts, and the shapes
    of ours; `save` takes our tensors. Both may return views and must work on all devices, including meta: expected
    checkpoint shapes are the shapes that `save` returns.
    """

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return tensors

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


@dataclass(frozen=True)
class HubOnly(Identity):
    """Hub tensors that are never loaded, and copied unchanged when a checkpoint is written. `ours` is `()`."""


@dataclass(frozen=True)
class MultiTokenPrediction(HubOnly):
    """Layers that predict further tokens, for speculative decoding. They are not trained."""


@dataclass(frozen=True)
class Stack(Identity):
    """One Hub tensor per expert; ours are stacked along a new first dimension."""

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [torch.stack(tensors)]

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind())


@dataclass(frozen=True)
class Fused(Identity):
    """One Hub tensor; ours are its shards along `dim`, contiguous or interleaved.

    `transposed`: the last two dimensions are swapped in the Hub tensor. `dim` refers to our layout.
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
    """Hub tensors with the last two dimensions swapped."""

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [tensor.mT for tensor in tensors]

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.mT for tensor in tensors]


@dataclass(frozen=True)
class Unsqueezed(Identity):
    """Hub tensors with one more dimension of size 1, the first one."""

    def load(self, tensors: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        return [tensor.squeeze(0) for tensor in tensors]

    def save(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor[None] for tensor in tensors]


@dataclass(frozen=True)
class KeyRule:
    """Our modules or tensors, those of the Hub, and the conversion between them. A single name needs no tuple."""

    ours: str | tuple[str, ...]
    hub: str | tuple[str, ...]
    op: Identity = Identity()


@dataclass(frozen=True)
class KeyMatch:
    """Rule that matches a name, and the variable parts of the name."""

    rule: KeyRule
    index: tuple[str, ...]  # layer indices
    tail: str  # ".weight", ".lora_A.weight", or nothing for a module
    position: int  # index among the names of its side of the rule
    expert: int | None = None

    @property
    def ours(self) -> tuple[str, ...]:
        """All our names of the rule."""
        return self.names(self.rule.ours)

    @property
    def hub(self) -> tuple[str, ...]:
        """All Hub names of the rule; `*` stands for an expert index."""
        return self.names(self.rule.hub)

    def names(self, side: str | tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.format(*self.index) + self.tail for name in as_tuple(side))


@dataclass(frozen=True)
class KeyMapping:
    """Tensors that are loaded or saved together, one mapping at a time to limit memory."""

    ours: tuple[str, ...]
    hub: tuple[str, ...]
    op: Identity

    def load(self, tensors: list[Tensor], shapes: Mapping[str, Shape]) -> list[Tensor]:
        """Convert Hub tensors to ours. `shapes` are the shapes of the model's parameters, by name."""
        return self.op.load(tensors, [shapes[name] for name in self.ours])

    def hub_shapes(self, shapes: Mapping[str, Shape]) -> list[Shape]:
        """Shapes of the Hub tensors if ours have `shapes`."""
        return [tuple(t.shape) for t in self.op.save([torch.empty(shapes[name], device="meta") for name in self.ours])]


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """A tuple of one name, or the given tuple."""
    return (names,) if isinstance(names, str) else names


@cache
def compile_pattern(name: str) -> re.Pattern[str]:
    number = "(?:0|[1-9][0-9]*)"
    text = re.escape(name).replace(r"\{\}", f"({number})").replace(r"\*", f"(?P<expert>{number})")
    return re.compile(text + r"(?P<tail>(?:\..+)?)")


@cache
def compile_patterns(names: str | tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(compile_pattern, as_tuple(names)))


def match_rule(name: str, rule: KeyRule, side: str | tuple[str, ...]) -> KeyMatch | None:
    for position, candidate in enumerate(compile_patterns(side)):
        if match := candidate.fullmatch(name):
            groups = match.groupdict()
            index = tuple(g for i, g in enumerate(match.groups(), 1) if i not in match.re.groupindex.values())
            expert = groups.get("expert")
            return KeyMatch(rule, index, groups["tail"], position, None if expert is None else int(expert))
    return None


def match_hub_name(name: str, table: tuple[KeyRule, ...]) -> KeyMatch | None:
    """Rule of a Hub tensor or module; None if there is none.

    Some rules match single tensors: look up a module by the name of its weight.
    """
    return next((match for row in table if (match := match_rule(name, row, row.hub))), None)


def match_name(name: str, table: tuple[KeyRule, ...]) -> KeyMatch:
    """Rule of one of our tensors or modules. Each has one."""
    match = next((candidate for row in table if (candidate := match_rule(name, row, row.ours))), None)
    assert match is not None, f"the table has no row for {name}"
    return match


def expand_experts(names: tuple[str, ...], experts: int) -> tuple[str, ...]:
    """Replace `*` by each expert index, one name after the other."""
    return tuple(n.replace("*", str(e)) for n in names for e in range(experts if "*" in n else 1))


def load_mappings(names: Iterable[str], table: tuple[KeyRule, ...]) -> tuple[list[KeyMapping], list[str]]:
    """Mappings that load the tensors of a checkpoint, and the names without a rule.

    A mapping needs all tensors of its rule: if one is missing, the mapping contains a name that is not in `names`.
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
    """One mapping for matches that differ in their expert or position in the rule.

    It has as many experts as there are distinct indices: if one is missing, so is a smaller index.
    """
    first, experts = group[0], len({match.expert for match in group})
    return KeyMapping(first.ours, expand_experts(first.hub, experts), first.rule.op)


def save_mappings(shapes: Mapping[str, Shape], table: tuple[KeyRule, ...]) -> list[KeyMapping]:
    """Mappings that save our tensors without a source checkpoint: the first matching rule of each."""
    mappings: dict[KeyMapping, None] = {}
    for name, shape in shapes.items():
        match = match_name(name, table)
        mappings[KeyMapping(match.ours, expand_experts(match.hub, shape[0] if shape else 0), match.rule.op)] = None
    return list(mappings)


def to_hub_name(name: str, table: tuple[KeyRule, ...]) -> str:
    """Hub name of one of our tensors or modules: of the fused tensor, and with `*` for all experts."""
    return match_name(name, table).hub[0]


def with_prefix(prefix: str, table: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """Table with `prefix` instead of `model.`, for text models inside multimodal ones."""

    def replace_prefix(name: str) -> str:
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    return tuple(KeyRule(row.ours, tuple(map(replace_prefix, as_tuple(row.hub))), row.op) for row in table)
