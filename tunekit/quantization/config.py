"""Storage formats of frozen weights: as in the checkpoint, or quantized to 4 or 8 bits."""

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

LAYER_PREFIX = "layers."  # the embedding and lm_head are not quantized: they are sensitive, and may be trained


@dataclass(frozen=True)
class NoQuantization:
    """Keep weights unquantized; see `precision` for their dtype."""

    kind: ClassVar[str] = "none"
    keeps_prequantized: ClassVar[bool] = False  # load values of quantized checkpoints before they are rounded
    trainable: ClassVar[bool] = True  # an optimizer step can change the weights

    def apply(self, model: nn.Module) -> None:
        """Leave the model unchanged."""

    def warnings(self, model: nn.Module) -> list[str]:
        """Warnings for the user about layers that are not quantized."""
        return []


@dataclass(frozen=True)
class Float8Config(NoQuantization):
    """8-bit floats with one scale per 64 values: 8.5 bits per weight. For the linear layers of the decoder layers."""

    keeps_prequantized: ClassVar[bool] = True
    keeps_shared_keys: ClassVar[bool] = True  # FP4 keeps the keys of NF4, and the reverse
    trainable: ClassVar[bool] = False
    kind: ClassVar[str] = "float8"
    values_per_byte: ClassVar[int] = 1
    codec: ClassVar[ModuleType] = float8

    @property
    def quantizes_scales(self) -> bool:
        """Whether block scales are quantized as well (double quantization)."""
        return False

    def apply(self, model: nn.Module) -> None:
        """Replace linear layers by quantized ones. Weights are quantized one by one while they are loaded."""
        for name, layer in quantizable_layers(model).items():
            parent, _, attribute = name.rpartition(".")
            if can_quantize(layer):
                quantized = (
                    QuantizedLinear(layer, self) if isinstance(layer, Linear) else QuantizedGroupedLinear(layer, self)
                )
                setattr(model.get_submodule(parent), attribute, quantized)

    def warnings(self, model: nn.Module) -> list[str]:
        layers = quantizable_layers(model)
        unsupported = [name for name, layer in layers.items() if layer.in_features % nf4.BLOCK]
        modules = ", ".join(sorted({name.rpartition(".")[2] for name in unsupported}))
        message = (
            f"quantization: {len(unsupported)} layers are not quantized, because their input size is not a multiple of "
            f"{nf4.BLOCK}: {modules}"
        )
        return [message] if unsupported else []


@dataclass(frozen=True)
class NF4Config(Float8Config):
    """4-bit NormalFloat (QLoRA, arXiv:2305.14314), byte-compatible with bitsandbytes."""

    double_quant: bool = False  # Quantize the block scales to 8 bits: 4.13 instead of 4.5 bits per weight
    kind: ClassVar[str] = "nf4"
    values_per_byte: ClassVar[int] = 2
    codec: ClassVar[ModuleType] = nf4

    @property
    def quantizes_scales(self) -> bool:
        return self.double_quant


@dataclass(frozen=True)
class FP4Config(NF4Config):
    """4-bit E2M1 floats; less accurate than nf4, for checkpoints already stored as FP4."""

    kind: ClassVar[str] = "fp4"


def quantizable_layers(model: nn.Module) -> dict[str, Linear | GroupedLinear]:
    """Linear layers of the decoder layers by name, without adapter layers."""
    modules = {n: m for n, m in model.named_modules() if n.startswith(LAYER_PREFIX) and ".lora_" not in n}
    return {name: module for name, module in modules.items() if isinstance(module, Linear | GroupedLinear)}


def can_quantize(layer: Linear | GroupedLinear) -> bool:
    """Whether rows consist of complete blocks, so that they can be sharded, and the layer is large enough.

    Layers with few outputs, such as gates, are sensitive and need little memory.
    """
    return layer.in_features % nf4.BLOCK == 0 and layer.out_features >= nf4.BLOCK


class QuantizedWeightMixin(nn.Module):
    """Storage of quantized weights for QuantizedLinear and QuantizedGroupedLinear.

    Bytes are uint8 parameters without a gradient: FSDP shards them, nothing casts them, and training states omit them.
    """

    quantized_weight: nn.Parameter  # (..., in / values_per_byte) uint8
    scales: nn.Parameter  # block scales, uint8: (..., in / 16), bytes of fp32; with double quantization (..., in / 64)
    outer_scales: nn.Parameter | None  # (bytes,) uint8: fp32 scales and offset of the quantized block scales
    kind: str
    codec: ModuleType  # kernel module that quantizes, dequantizes and multiplies
    values_per_byte: int

    def allocate_storage(self, weight: Tensor, choice: Float8Config) -> None:
        """Allocate uninitialized storage for a weight of this shape, on its device."""
        *rows, columns = weight.shape
        blocks = columns // nf4.BLOCK
        groups = -(-weight.numel() // (nf4.BLOCK * nf4.DOUBLE_QUANT_BLOCK))
        self.kind, self.codec, self.values_per_byte = choice.kind, choice.codec, choice.values_per_byte
        self.quantized_weight = empty_uint8_param(*rows, columns // choice.values_per_byte, device=weight.device)
        self.scales = empty_uint8_param(*rows, blocks if choice.quantizes_scales else 4 * blocks, device=weight.device)
        outer_size = 4 * (groups + 1)
        outer_scales = empty_uint8_param(outer_size, device=weight.device) if choice.quantizes_scales else None
        self.register_parameter("outer_scales", outer_scales)

    @property
    def quantized_tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.quantized_weight, self.scales, self.outer_scales

    @property
    def shape(self) -> Shape:
        """Shape of the full, unsharded weight."""
        *rows, columns = shard_slice(self.quantized_weight).shape
        return *rows, columns * self.values_per_byte

    def dequantize(self, gather: Gather = identity) -> Tensor:
        """Weight in fp32."""
        outer_scales = None if self.outer_scales is None else gather(self.outer_scales)
        return self.codec.dequantize(gather(self.quantized_weight), gather(self.scales), outer_scales, self.kind)

    def load_weight(self, weight: Tensor) -> None:
        """Quantize a full weight from a checkpoint into this shard. 4-bit weights of a checkpoint keep their values."""
        packed, scales = self.codec.quantize(weight.to(self.quantized_weight.device), self.kind)
        if self.outer_scales is not None:
            scales, outer_scales = nf4.double_quantize(scales)
            copy_to_shard(self.outer_scales, outer_scales.view(torch.uint8))
        rows = weight.shape[:-1]
        copy_to_shard(self.quantized_weight, packed.view(*rows, -1))
        copy_to_shard(self.scales, scales.view(torch.uint8).view(*rows, -1))


class QuantizedLinear(QuantizedWeightMixin, Linear):
    """Linear layer with a quantized weight."""

    def __init__(self, layer: Linear, choice: Float8Config) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self.allocate_storage(layer.weight, choice)

    def matmul(self, x: Tensor) -> Tensor:
        bias = None if self.effective_bias is None else self.effective_bias.to(x.dtype)
        return self.codec.matmul(x, *self.quantized_tensors, self.kind, bias)

    @property
    def is_frozen(self) -> bool:
        return True

    def matmul_backward(self, grad: Tensor, into: Tensor | None = None) -> Tensor:
        if into is not None and grad.device.type != "cpu":  # saves a kernel and a temporary (N, in) tensor
            return into.addmm_(grad, self.codec.dequantize(*self.quantized_tensors, self.kind, grad.dtype))
        grad_input = self.codec.matmul_backward(grad, *self.quantized_tensors, self.kind)
        return grad_input if into is None else into.add_(grad_input)

    def iter_fp32_rows(self, num_rows: int) -> Iterator[Tensor]:
        scales = self.codec.unpack_scales(self.scales, self.outer_scales).view(torch.uint8)
        chunks = zip(self.quantized_weight.split(num_rows), scales.split(num_rows), strict=True)
        return (self.codec.dequantize(packed, chunk_scales, None, self.kind) for packed, chunk_scales in chunks)


class QuantizedGroupedLinear(QuantizedWeightMixin, GroupedLinear):
    """Linear layers of all experts, with quantized weights."""

    def __init__(self, layer: GroupedLinear, choice: Float8Config) -> None:
        nn.Module.__init__(self)
        self.experts, self.in_features, self.out_features = layer.experts, layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self.allocate_storage(layer.weight, choice)

    def matmul(self, x: Tensor, sizes: Tensor) -> Tensor:
        y = self.codec.grouped_matmul(x, *self.quantized_tensors, sizes, self.kind)
        if self.effective_bias is None:
            return y
        return y + self.effective_bias.to(x.dtype).repeat_interleave(sizes, dim=0, output_size=len(x))


def empty_uint8_param(*shape: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
