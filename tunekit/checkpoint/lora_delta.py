"""LoRA deltas of model layers and of the checkpoint tensors that fuse or stack these layers."""

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
    """Weight update scale * B A, with A (..., rank, in) and B (..., out, rank), and the DoRA magnitude (..., out)."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def for_expert(self, expert: int) -> "LoRADelta":
        """Delta of one expert."""
        return replace(self, a=self.a[expert], b=self.b[expert])

    def block(self, start: int, rank: int, scale: float) -> "LoRADelta":
        """Rows of A and columns of B from `start`, rescaled to `scale`."""
        b = self.b.narrow(-1, start, rank)
        b = b if scale == self.scale else b * (self.scale / scale)
        return replace(self, a=self.a.narrow(-2, start, rank), b=b, scale=scale)


@dataclass(frozen=True)
class LoRATarget:
    """Layers that share checkpoint tensors: one to one, several fused into one, or one tensor per expert."""

    layers: tuple[str, ...]
    tensors: tuple[str, ...]  # checkpoint names; `*` is the expert index
    op: Identity

    @staticmethod
    def from_match(match: KeyMatch) -> "LoRATarget":
        return LoRATarget(tuple(name.removesuffix(WEIGHT) for name in match.ours), match.hub, match.rule.op)

    def tensor_names(self, experts: int) -> tuple[str, ...]:
        """Names of the checkpoint tensors, for every expert."""
        return expand_experts(self.tensors, experts)

    @property
    def output_op(self) -> Identity:
        """Conversion of the output dimension. A and B are never transposed, even if the weight is."""
        if isinstance(self.op, Fused):
            return replace(self.op, transposed=False)
        return Identity() if isinstance(self.op, Transposed) else self.op

    def shapes(self, layer_shapes: Sequence[Shape]) -> list[Shape]:
        """Shapes (..., out, in) of the checkpoint tensors, from the weight shapes of the layers."""
        return [
            tuple(t.shape) for t in self.output_op.save([torch.empty(shape, device="meta") for shape in layer_shapes])
        ]

    def to_checkpoint(self, deltas: Sequence[LoRADelta]) -> list[LoRADelta]:
        """Convert deltas of the layers to deltas of the checkpoint tensors."""
        if isinstance(self.op, Stack):
            return [replace(deltas[0], a=a, b=b) for a, b in zip(deltas[0].a, deltas[0].b, strict=True)]
        return convert_deltas(self.output_op.save, deltas)

    def from_checkpoint(self, deltas: Sequence[LoRADelta], layer_shapes: Sequence[Shape]) -> list[LoRADelta]:
        """Convert deltas of the checkpoint tensors to deltas of the layers, whose weights have these shapes."""
        if isinstance(self.op, Stack):
            a, b = torch.stack([delta.a for delta in deltas]), torch.stack([delta.b for delta in deltas])
            return [replace(deltas[0], a=a, b=b)]
        return convert_deltas(lambda tensors: self.output_op.load(tensors, [*layer_shapes]), deltas)


def transformers_key(name: str, family: Family) -> KeyMatch:
    """Key of a parameter in transformers, which stacks experts even if the checkpoint has one tensor per expert."""
    stacked: KeyMatch | None = None
    for rule in family.modules:
        match = match_rule(name, rule, rule.ours)
        if match is not None and "*" not in match.hub[0]:
            return match
        stacked = stacked or match
    assert stacked is not None, f"the table has no row for {name}"
    return stacked


def convert_deltas(convert: Convert, deltas: Sequence[LoRADelta]) -> list[LoRADelta]:
    """Convert deltas with an operation that concatenates, splits or permutes outputs.

    The A factors are concatenated, and each B is padded with zeros to the total rank.
    """
    if len(deltas) == 1:
        a, scale, bs = deltas[0].a, deltas[0].scale, [deltas[0].b]
    else:
        a, scale, bs = concatenate_factors(deltas)
    outputs = convert(bs)
    magnitudes = [delta.magnitude for delta in deltas if delta.magnitude is not None]
    converted = convert(magnitudes) if magnitudes else [None] * len(outputs)
    return [LoRADelta(a, b, scale, magnitude) for b, magnitude in zip(outputs, converted, strict=True)]


def concatenate_factors(deltas: Sequence[LoRADelta]) -> tuple[Tensor, float, list[Tensor]]:
    """All A factors in one, the common scale, and each B padded with zeros to the total rank."""
    scale = next((delta.scale for delta in deltas if delta.rank), deltas[0].scale)
    ranks = [delta.rank for delta in deltas]
    starts, total = accumulate(ranks, initial=0), sum(ranks)
    scaled = [delta.b if delta.scale == scale else delta.b * (delta.scale / scale) for delta in deltas]
    bs = [F.pad(b, (start, total - start - b.shape[-1])) for b, start in zip(scaled, starts, strict=False)]
    return torch.cat([delta.a for delta in deltas], dim=-2), scale, bs
