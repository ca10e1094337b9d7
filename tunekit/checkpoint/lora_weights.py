"""Low-rank updates on both sides of a weight table: of our layers, and of the tensors that the Hub joins them into."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.models.families.registry import Family
from tunekit.models.weight_map import Fused, Identity, KeyMatch, Shape, Stack, Transposed, expand_experts, match_rule

WEIGHT = ".weight"
Convert = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class LoRADelta:
    """s B A, with A (..., rank, in) and B (..., out, rank). DoRA gives every output a magnitude, (..., out)."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def of(self, expert: int) -> "LoRADelta":
        """That of one expert."""
        return replace(self, a=self.a[expert], b=self.b[expert])

    def part(self, start: int, rank: int, scale: float) -> "LoRADelta":
        """Some of its directions, under a scale of their own."""
        b = self.b.narrow(-1, start, rank)
        b = b if scale == self.scale else b * (self.scale / scale)
        return replace(self, a=self.a.narrow(-2, start, rank), b=b, scale=scale)


@dataclass(frozen=True)
class LoRATarget:
    """Where the Hub has layers of ours: in a tensor of its own, in one for several, in one for each expert."""

    ours: tuple[str, ...]  # layers
    hub: tuple[str, ...]  # tensors
    op: Identity

    @staticmethod
    def of(match: KeyMatch) -> "LoRATarget":
        return LoRATarget(tuple(name.removesuffix(WEIGHT) for name in match.ours), match.hub, match.row.op)

    def names(self, experts: int) -> tuple[str, ...]:
        """The Hub's tensors, with every expert."""
        return expand_experts(self.hub, experts)

    @property
    def rows(self) -> Identity:
        """What happens to outputs. A and B keep their meaning even where the weight is transposed."""
        if isinstance(self.op, Fused):
            return replace(self.op, transposed=False)
        return Identity() if isinstance(self.op, Transposed) else self.op

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Shapes (..., out, in) of the Hub's tensors where those of our weights are given."""
        return [tuple(t.shape) for t in self.rows.save([torch.empty(shape, device="meta") for shape in ours])]

    def out(self, updates: Sequence[LoRADelta]) -> list[LoRADelta]:
        """From updates of our layers to those of the Hub's tensors."""
        if isinstance(self.op, Stack):
            return [replace(updates[0], a=a, b=b) for a, b in zip(updates[0].a, updates[0].b, strict=True)]
        return through(self.rows.save, updates)

    def back(self, updates: Sequence[LoRADelta], ours: Sequence[Shape]) -> list[LoRADelta]:
        """From updates of the Hub's tensors to those of our layers, whose weights have these shapes."""
        if isinstance(self.op, Stack):
            a, b = torch.stack([u.a for u in updates]), torch.stack([u.b for u in updates])
            return [replace(updates[0], a=a, b=b)]
        return through(lambda tensors: self.rows.load(tensors, [*ours]), updates)


def transformers_key(name: str, family: Family) -> KeyMatch:
    """Where transformers has one of our tensors: it stacks experts in one, whatever a checkpoint does."""
    found = [match for row in family.modules if (match := match_rule(name, row, row.ours))]
    return next((match for match in found if "*" not in match.hub[0]), found[0])


def through(convert: Convert, updates: Sequence[LoRADelta]) -> list[LoRADelta]:
    """The updates behind a conversion that joins, cuts or sorts outputs: the As in a row, each B beside zeros."""
    scale = next((u.scale for u in updates if u.rank), updates[0].scale)
    ranks = [u.rank for u in updates]
    starts, total = accumulate(ranks, initial=0), sum(ranks)
    same = [u.b if u.scale == scale else u.b * (u.scale / scale) for u in updates]
    bs = [F.pad(b, (at, total - at - b.shape[-1])) for b, at in zip(same, starts, strict=False)]
    a, made = torch.cat([u.a for u in updates], dim=-2), convert(bs)
    magnitudes = [u.magnitude for u in updates if u.magnitude is not None]
    lengths = convert(magnitudes) if magnitudes else [None] * len(made)
    return [LoRADelta(a, b, scale, length) for b, length in zip(made, lengths, strict=True)]
