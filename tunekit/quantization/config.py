"""How frozen weights are stored: as the checkpoint has them, or in four or eight bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor, nn

from tunekit.distributed.sharding import copy_to_shard, shard_slice
from tunekit.kernels import float8, nf4
from tunekit.models.linear import Gather, GroupedLinear, Linear, identity
from tunekit.models.weight_map import Shape

LAYER_PREFIX = "layers."  # embedding and head decide much, and a trained head could not be so stored


@dataclass(frozen=True)
class NoQuantization:
    """Numbers as they come; `precision` says in which dtype."""

    kind: ClassVar[str] = "none"
    keeps_prequantized: ClassVar[bool] = False  # whether numbers that were packed are wanted before they are rounded
    trainable: ClassVar[bool] = True  # whether a step can change them

    def apply(self, model: nn.Module) -> None:
        """Every layer stays what it is."""

    def warnings(self, model: nn.Module) -> list[str]:
        """What a person should know of how this model is stored."""
        return []


@dataclass(frozen=True)
class Float8Config(NoQuantization):
    """Linear layers of the blocks as floats of eight bits, with a scale for 64 of them: 8.5 bits a number in all."""

    keeps_prequantized: ClassVar[bool] = True
    trainable: ClassVar[bool] = False
    kind: ClassVar[str] = "float8"
    values_per_byte: ClassVar[int] = 1  # numbers in a byte
    codec: ClassVar[ModuleType] = float8

    @property
    def quantizes_scales(self) -> bool:
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

    def warnings(self, model: nn.Module) -> list[str]:
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
    values_per_byte: ClassVar[int] = 2
    codec: ClassVar[ModuleType] = nf4

    @property
    def quantizes_scales(self) -> bool:
        return self.double_quant


@dataclass(frozen=True)
class FP4Config(NF4Config):
    """The same with the numbers of a float of four bits, which lose more: for what was made so."""

    kind: ClassVar[str] = "fp4"


def quantizable_layers(model: nn.Module) -> dict[str, Linear | GroupedLinear]:
    """The linear layers of the blocks, by name, without what adapters add."""
    found = {
        n: m for n, m in model.named_modules() if n.startswith(LAYER_PREFIX) and isinstance(m, Linear | GroupedLinear)
    }
    return {name: layer for name, layer in found.items() if ".lora_" not in name}


def can_quantize(layer: Linear | GroupedLinear) -> bool:
    """Whether rows are whole blocks, so that they can be divided among devices, and there are some of them.

    A layer of a few outputs, such as a gate, decides much and weighs nothing.
    """
    return layer.in_features % nf4.BLOCK == 0 and layer.out_features >= nf4.BLOCK


class QuantizedWeightMixin(nn.Module):
    """What the packed kinds of Linear and Stacked share. Bytes are parameters without a gradient: sharded with the
    others, cast by nobody, and no part of the state of a run."""

    quantized_weight: nn.Parameter  # (..., in), or (..., in / 2) with two numbers in each
    scales: nn.Parameter  # (..., in / 16), the bytes of fp32; nested: (..., in / 64)
    double_quant_state: nn.Parameter | None  # what decodes nested scales, (bytes,)
    kind: str
    codec: ModuleType  # what packs, unpacks and multiplies
    values_per_byte: int  # numbers in a byte

    def allocate_storage(self, weight: Tensor, choice: Float8Config) -> None:
        """Make room for a weight of this shape, there where it is."""
        *rows, columns = weight.shape
        blocks = columns // nf4.BLOCK
        groups = -(-weight.numel() // (nf4.BLOCK * nf4.NESTED))
        self.kind, self.codec, self.values_per_byte = choice.kind, choice.codec, choice.values_per_byte
        self.quantized_weight = empty_uint8_param(*rows, columns // choice.values_per_byte, device=weight.device)
        self.scales = empty_uint8_param(*rows, blocks if choice.quantizes_scales else 4 * blocks, device=weight.device)
        state_size = 4 * (groups + 1)
        double_quant_state = empty_uint8_param(state_size, device=weight.device) if choice.quantizes_scales else None
        self.register_parameter("double_quant_state", double_quant_state)

    @property
    def quantized_tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.quantized_weight, self.scales, self.double_quant_state

    @property
    def shape(self) -> Shape:
        """That of the whole weight, whatever part of it is here."""
        *rows, columns = shard_slice(self.quantized_weight).shape
        return *rows, columns * self.values_per_byte

    def dequantize(self, gather: Gather = identity) -> Tensor:
        """The weight as numbers, in fp32."""
        outer = None if self.double_quant_state is None else gather(self.double_quant_state)
        return self.codec.dequantize(gather(self.quantized_weight), gather(self.scales), outer, self.kind)

    def load_weight(self, weight: Tensor) -> None:
        """Take a weight as it stands in a checkpoint. One that was in four bits there comes out as it was."""
        packed, scales = self.codec.quantize(weight.to(self.quantized_weight.device), self.kind)
        if self.double_quant_state is not None:
            scales, outer = nf4.double_quantize(scales)
            copy_to_shard(self.double_quant_state, outer.view(torch.uint8))
        rows = weight.shape[:-1]
        copy_to_shard(self.quantized_weight, packed.view(*rows, -1))
        copy_to_shard(self.scales, scales.view(torch.uint8).view(*rows, -1))


class QuantizedLinear(QuantizedWeightMixin, Linear):
    """A linear layer whose weight is kept in few bits."""

    def __init__(self, layer: Linear, choice: Float8Config) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self.allocate_storage(layer.weight, choice)

    def matmul(self, x: Tensor) -> Tensor:
        bias = None if self.effective_bias is None else self.effective_bias.to(x.dtype)
        return self.codec.product(x, *self.quantized_tensors, self.kind, bias)

    @property
    def is_frozen(self) -> bool:
        return True

    def matmul_backward(self, grad: Tensor, into: Tensor | None = None) -> Tensor:
        if into is not None and grad.device.type != "cpu":  # one kernel less, and no (N, in) between
            return into.addmm_(grad, self.codec.dequantize(*self.quantized_tensors, self.kind, grad.dtype))
        found = self.codec.product_back(grad, *self.quantized_tensors, self.kind)
        return found if into is None else into.add_(found)

    def iter_fp32_rows(self, num_rows: int) -> Iterator[Tensor]:
        scales = self.codec.unpacked_scales(self.scales, self.double_quant_state).view(torch.uint8)
        parts = zip(self.quantized_weight.split(num_rows), scales.split(num_rows), strict=True)
        return (self.codec.dequantize(packed, some, None, self.kind) for packed, some in parts)


class QuantizedGroupedLinear(QuantizedWeightMixin, GroupedLinear):
    """The linear layers of all experts, their weights kept in few bits."""

    def __init__(self, layer: GroupedLinear, choice: Float8Config) -> None:
        nn.Module.__init__(self)
        self.experts, self.in_features, self.out_features = layer.experts, layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self.allocate_storage(layer.weight, choice)

    def matmul(self, x: Tensor, sizes: Tensor) -> Tensor:
        y = self.codec.grouped(x, *self.quantized_tensors, sizes, self.kind)
        if self.effective_bias is None:
            return y
        return y + self.effective_bias.to(x.dtype).repeat_interleave(sizes, dim=0, output_size=len(x))


def empty_uint8_param(*shape: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
