"""How frozen weights are stored: as the checkpoint has them, or in four or eight bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor, nn

from tunekit.distributed.sharding import copy_to_shard, shard_slice
from tunekit.kernels import float8, nf4
from tunekit.models.linear import Get, GroupedLinear, Linear, identity
from tunekit.models.weight_map import Shape

WITHIN = "layers."  # embedding and head decide much, and a trained head could not be so stored


@dataclass(frozen=True)
class NoQuantization:
    """Numbers as they come; `precision` says in which dtype."""

    kind: ClassVar[str] = "none"
    exact: ClassVar[bool] = False  # whether numbers that were packed are wanted before they are rounded
    trainable: ClassVar[bool] = True  # whether a step can change them

    def apply(self, model: nn.Module) -> None:
        """Every layer stays what it is."""

    def remarks(self, model: nn.Module) -> list[str]:
        """What a person should know of how this model is stored."""
        return []


@dataclass(frozen=True)
class Float8Config(NoQuantization):
    """Linear layers of the blocks as floats of eight bits, with a scale for 64 of them: 8.5 bits a number in all."""

    exact: ClassVar[bool] = True
    trainable: ClassVar[bool] = False
    kind: ClassVar[str] = "float8"
    each: ClassVar[int] = 1  # numbers in a byte
    codec: ClassVar[ModuleType] = float8

    @property
    def packs_scales(self) -> bool:
        """Whether the scales are in few bits too."""
        return False

    def apply(self, model: nn.Module) -> None:
        """Quantized as they are filled: the numbers of no more than one tensor are there at a time."""
        for name, layer in quantizable_layers(model).items():
            owner, _, leaf = name.rpartition(".")
            if can_quantize(layer):
                made = (
                    QuantizedLinear(layer, self) if isinstance(layer, Linear) else QuantizedGroupedLinear(layer, self)
                )
                setattr(model.get_submodule(owner), leaf, made)

    def remarks(self, model: nn.Module) -> list[str]:
        odd = [name for name, layer in quantizable_layers(model).items() if layer.in_features % nf4.BLOCK]
        leaves = ", ".join(sorted({name.rpartition(".")[2] for name in odd}))
        told = (
            f"quantization: {len(odd)} layers stay plain, for {nf4.BLOCK} does not divide the size of their "
            f"input: {leaves}"
        )
        return [told] if odd else []


@dataclass(frozen=True)
class NF4Config(Float8Config):
    """Linear layers of the blocks in four bits, as QLoRA has it (arXiv:2305.14314), byte for byte as bitsandbytes."""

    double_quant: bool = False  # Quantize the block scales to 8 bits: 4.13 instead of 4.5 bits per weight
    kind: ClassVar[str] = "nf4"
    each: ClassVar[int] = 2
    codec: ClassVar[ModuleType] = nf4

    @property
    def packs_scales(self) -> bool:
        return self.double_quant


@dataclass(frozen=True)
class FP4Config(NF4Config):
    """The same with the numbers of a float of four bits, which lose more: for what was made so."""

    kind: ClassVar[str] = "fp4"


def quantizable_layers(model: nn.Module) -> dict[str, Linear | GroupedLinear]:
    """The linear layers of the blocks, by name, without what adapters add."""
    found = {n: m for n, m in model.named_modules() if n.startswith(WITHIN) and isinstance(m, Linear | GroupedLinear)}
    return {name: layer for name, layer in found.items() if ".lora_" not in name}


def can_quantize(layer: Linear | GroupedLinear) -> bool:
    """Whether rows are whole blocks, so that they can be divided among devices, and there are some of them.

    A layer of a few outputs, such as a gate, decides much and weighs nothing.
    """
    return layer.in_features % nf4.BLOCK == 0 and layer.out_features >= nf4.BLOCK


class QuantizedWeightMixin(nn.Module):
    """What the packed kinds of Linear and Stacked share. Bytes are parameters without a gradient: sharded with the
    others, cast by nobody, and no part of the state of a run."""

    packed: nn.Parameter  # (..., in), or (..., in / 2) with two numbers in each
    scales: nn.Parameter  # (..., in / 16), the bytes of fp32; nested: (..., in / 64)
    outer: nn.Parameter | None  # what decodes nested scales, (bytes,)
    kind: str
    codec: ModuleType  # what packs, unpacks and multiplies
    each: int  # numbers in a byte

    def hold(self, weight: Tensor, choice: Float8Config) -> None:
        """Make room for a weight of this shape, there where it is."""
        *rows, columns = weight.shape
        blocks = columns // nf4.BLOCK
        groups = -(-weight.numel() // (nf4.BLOCK * nf4.NESTED))
        self.kind, self.codec, self.each = choice.kind, choice.codec, choice.each
        self.packed = empty_uint8_param(*rows, columns // choice.each, device=weight.device)
        self.scales = empty_uint8_param(*rows, blocks if choice.packs_scales else 4 * blocks, device=weight.device)
        outer = empty_uint8_param(4 * (groups + 1), device=weight.device) if choice.packs_scales else None
        self.register_parameter("outer", outer)

    @property
    def weight_parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.packed, self.scales, self.outer

    @property
    def shape(self) -> Shape:
        """That of the whole weight, whatever part of it is here."""
        *rows, columns = shard_slice(self.packed).shape
        return *rows, columns * self.each

    def dense(self, get: Get = identity) -> Tensor:
        """The weight as numbers, in fp32."""
        outer = None if self.outer is None else get(self.outer)
        return self.codec.dequantize(get(self.packed), get(self.scales), outer, self.kind)

    def fill(self, weight: Tensor) -> None:
        """Take a weight as it stands in a checkpoint. One that was in four bits there comes out as it was."""
        packed, scales = self.codec.quantize(weight.to(self.packed.device), self.kind)
        if self.outer is not None:
            scales, outer = nf4.double_quantize(scales)
            copy_to_shard(self.outer, outer.view(torch.uint8))
        rows = weight.shape[:-1]
        copy_to_shard(self.packed, packed.view(*rows, -1))
        copy_to_shard(self.scales, scales.view(torch.uint8).view(*rows, -1))


class QuantizedLinear(QuantizedWeightMixin, Linear):
    """A linear layer whose weight is kept in few bits."""

    def __init__(self, layer: Linear, choice: Float8Config) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self.hold(layer.weight, choice)

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.added is None else self.added.to(x.dtype)
        return self.codec.product(x, *self.weight_parts, self.kind, bias)

    @property
    def frozen(self) -> bool:
        return True

    def back(self, grad: Tensor, into: Tensor | None = None) -> Tensor:
        if into is not None and grad.device.type != "cpu":  # one kernel less, and no (N, in) between
            return into.addmm_(grad, self.codec.dequantize(*self.weight_parts, self.kind, grad.dtype))
        found = self.codec.product_back(grad, *self.weight_parts, self.kind)
        return found if into is None else into.add_(found)

    def fine(self, rows: int) -> Iterator[Tensor]:
        scales = self.codec.unpacked_scales(self.scales, self.outer).view(torch.uint8)
        parts = zip(self.packed.split(rows), scales.split(rows), strict=True)
        return (self.codec.dequantize(packed, some, None, self.kind) for packed, some in parts)


class QuantizedGroupedLinear(QuantizedWeightMixin, GroupedLinear):
    """The linear layers of all experts, their weights kept in few bits."""

    def __init__(self, layer: GroupedLinear, choice: Float8Config) -> None:
        nn.Module.__init__(self)
        self.experts, self.in_features, self.out_features = layer.experts, layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self.hold(layer.weight, choice)

    def product(self, x: Tensor, sizes: Tensor) -> Tensor:
        y = self.codec.grouped(x, *self.weight_parts, sizes, self.kind)
        if self.added is None:
            return y
        return y + self.added.to(x.dtype).repeat_interleave(sizes, dim=0, output_size=len(x))


def empty_uint8_param(*shape: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
