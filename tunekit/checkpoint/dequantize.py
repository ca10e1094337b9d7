"""Dequantizes quantized checkpoints when their tensors are read. A group of tensors in the files is one weight.

Groups are recognized by their tensor names. Results are bitwise equal to those of transformers and bitsandbytes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tunekit.checkpoint.safetensors_io import CONFIG_DTYPES, OpenFiles, TensorMeta, TensorReader
from tunekit.errors import UserError

QUANTIZATION_KEY = "quantization_config"  # the key of config.json
METHODS = ("mxfp4", "fp8", "bitsandbytes")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # non-negative values of the 4-bit format
MXFP4_BLOCK, BIAS = 32, 127  # values per scale; exponent bias
INT8 = 1 / 127
CHUNK = 2**19  # values that are decoded at a time, so that temporaries stay in the CPU cache


def check_quant_format(config: Mapping[str, Any], path: str) -> None:
    """Raise UserError for an unsupported quantization method in config.json."""
    quantization = config.get(QUANTIZATION_KEY)
    method = quantization.get("quant_method", "bitsandbytes") if isinstance(quantization, dict) else quantization
    if quantization and method not in METHODS:
        problem = f"unsupported quant_method {method!r}; supported: {', '.join(METHODS)}"
        raise UserError(f"{path}: {problem}. Use the unquantized checkpoint.")


@dataclass(frozen=True)
class PrequantizedTensor(TensorMeta):
    """A weight that is stored as a group of tensors."""

    sources: tuple[TensorMeta, ...]

    def read(self, files: OpenFiles) -> Tensor:
        return self.decode([source.read(files) for source in self.sources])

    def decode(self, tensors: list[Tensor]) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class MXFP4Tensor(PrequantizedTensor):
    """MXFP4 of gpt-oss: blocks (E, out, in / 32, 16) with two values per byte, low nibble first, and exponents of 2.

    The weight is (E, in, out).
    """

    def decode(self, tensors: list[Tensor]) -> Tensor:
        blocks, scales = tensors
        table = byte_table(torch.tensor((*E2M1, *(-x for x in E2M1))), low_first=True).to(self.dtype)
        output = torch.empty(*blocks.shape[:2], self.shape[1], dtype=self.dtype)
        rows = max(1, CHUNK // self.shape[1])
        for start in range(0, blocks.shape[0] * blocks.shape[1], rows):
            out, block, scale = (t.flatten(0, 1)[start : start + rows] for t in (output, blocks, scales))
            exponents = torch.pow(2.0, scale.int() - BIAS)[..., None]
            torch.mul(unpack_bytes(block, table), exponents, out=out.view_as(exponents.expand(-1, -1, MXFP4_BLOCK)))
        return output.mT


@dataclass(frozen=True)
class FP8BlockTensor(PrequantizedTensor):
    """8-bit floats (..., out, in), with one scale per block or one for the tensor."""

    block: tuple[int, ...] | None  # None: one scale for the tensor

    def decode(self, tensors: list[Tensor]) -> Tensor:
        packed, scales = tensors[0], tensors[1].float()
        if self.block is None:
            return (packed.float() * scales).to(self.dtype)
        output, (rows, columns) = torch.empty(self.shape, dtype=self.dtype), self.block
        for i, scale in enumerate(scales.unbind(-2)):
            index = (..., slice(i * rows, (i + 1) * rows), slice(None))
            output[index] = packed[index].float() * scale.repeat_interleave(columns, -1)[..., None, : self.shape[-1]]
        return output


@dataclass(frozen=True)
class Bnb4bitTensor(PrequantizedTensor):
    """bitsandbytes 4-bit: two indices per byte, high nibble first, into a table of 16 values; one scale per block.

    With double quantization, the scales are 8-bit indices into a second table, with their own scales and an offset.
    """

    block: int
    nested_block: int | None
    offset: float

    def has_valid_shapes(self) -> bool:
        """Whether the shapes of all tensors match the shape of the weight."""
        packed, scales, table, *nested = self.sources
        count = math.prod(self.shape)
        blocks = -(-count // self.block)
        outer = -(-blocks // self.nested_block) if self.nested_block else 0
        return (
            math.prod(packed.shape) * packed.dtype.itemsize == -(-count // 2)
            and scales.shape == (blocks,)
            and table.shape == (16,)
            and [meta.shape for meta in nested] == ([(outer,), (256,)] if self.nested_block else [])
        )

    def decode(self, tensors: list[Tensor]) -> Tensor:
        packed, scales, table, *nested = tensors
        if self.nested_block is not None:
            outer, outer_table = nested
            scales = scale_blocks(outer_table[scales.long()], outer, self.nested_block) + self.offset
        packed, table = packed.view(torch.uint8).flatten(), byte_table(table, low_first=False)
        output = torch.empty(math.prod(self.shape), dtype=self.dtype)
        blocks = max(1, CHUNK // self.block)
        for start in range(0, len(scales), blocks):
            offset, block_range = start * self.block, slice(start, start + blocks)
            out = output[offset : offset + blocks * self.block]
            values = unpack_bytes(packed[offset // 2 : (offset + len(out) + 1) // 2], table)[: len(out)]
            out.copy_(scale_blocks(values, scales[block_range], self.block))
        return output.view(self.shape)


@dataclass(frozen=True)
class Bnb8bitTensor(PrequantizedTensor):
    """LLM.int8(): one byte per value, and the absolute maximum of each row."""

    def decode(self, tensors: list[Tensor]) -> Tensor:
        rows, row_max = tensors
        return (rows * row_max[:, None] * INT8).to(self.dtype)


def byte_table(table: Tensor, low_first: bool) -> Tensor:
    """Values of the two nibbles of every byte (256, 2), from the values of a nibble (16,)."""
    halves = torch.arange(256)[:, None] >> torch.tensor([0, 4] if low_first else [4, 0]) & 15
    return table[halves]


def unpack_bytes(packed: Tensor, table: Tensor) -> Tensor:
    """Decode bytes (..., N) to values (..., 2 N)."""
    # Looking up both values as one wide integer is 2.4 times as fast (970 million bf16 values per second on one core).
    pair_table = table.view({2: torch.int32, 4: torch.int64}[table.itemsize]).flatten()
    return pair_table.index_select(0, packed.flatten().int()).view(table.dtype).view(*packed.shape[:-1], -1)


def scale_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of values (N,) by its scale; the last block may be shorter."""
    num_full = len(values) // block * block
    full = (values[:num_full].view(-1, block) * scales[: num_full // block, None]).flatten()
    return full if num_full == len(values) else torch.cat([full, values[num_full:] * scales[-1]])


@dataclass(frozen=True)
class TensorGroup:
    """A quantized weight, its name, and the names of all tensors of its group."""

    name: str
    tensor: PrequantizedTensor
    sources: tuple[str, ...]


@dataclass(frozen=True)
class QuantFormat:
    """Tensors and settings of a checkpoint in which quantized weights are searched."""

    reader: TensorReader
    block: tuple[int, ...]  # of FP8, from config.json
    dtype: torch.dtype  # of the dequantized weights

    def sources(self, *names: str) -> tuple[TensorMeta, ...]:
        return tuple(self.reader.tensors[name] for name in names)

    def existing(self, module: str, *leaves: str) -> tuple[str, ...]:
        """Names of the tensors of a module that exist."""
        return tuple(module + leaf for leaf in leaves if module + leaf in self.reader.tensors)


def find_mxfp4(name: str, checkpoint: QuantFormat) -> TensorGroup | None:
    base = name.removesuffix("_blocks")
    names = name, f"{base}_scales"
    if base == name or names[1] not in checkpoint.reader.tensors:
        return None
    blocks, scales = sources = checkpoint.sources(*names)
    require_consistent(blocks.shape == (*scales.shape, MXFP4_BLOCK // 2) and len(scales.shape) == 3, name, blocks)
    experts, rows, groups = scales.shape
    tensor = MXFP4Tensor(blocks.file, (experts, groups * MXFP4_BLOCK, rows), checkpoint.dtype, sources)
    return TensorGroup(base, tensor, names)


def find_fp8(name: str, checkpoint: QuantFormat) -> TensorGroup | None:
    names = name, f"{name}_scale_inv"
    if names[1] not in checkpoint.reader.tensors:
        return None
    weight, scales = sources = checkpoint.sources(*names)
    require_consistent(weight.dtype == torch.float8_e4m3fn and scales.dtype.is_floating_point, name, weight)
    block = None if math.prod(scales.shape) == 1 else checkpoint.block
    if block is not None:
        require_consistent(len(block) == 2 and len(weight.shape) > 1, name, weight)
        tiles = tuple(-(-size // tile) for size, tile in zip(weight.shape[-2:], block, strict=True))
        require_consistent(scales.shape == (*weight.shape[:-2], *tiles), name, weight)
    unused = checkpoint.existing(name.removesuffix("weight"), "activation_scale", "input_scale")
    tensor = FP8BlockTensor(weight.file, weight.shape, checkpoint.dtype, sources, block)
    return TensorGroup(name, tensor, (*names, *unused))


def find_int8_weights(name: str, checkpoint: QuantFormat) -> TensorGroup | None:
    module = name.removesuffix("weight")
    names = name, f"{module}SCB"
    if module == name or names[1] not in checkpoint.reader.tensors:
        return None
    rows, row_max = sources = checkpoint.sources(*names)
    is_valid = rows.dtype == torch.int8 and len(rows.shape) == 2 and row_max.shape == rows.shape[:1]
    require_consistent(is_valid, name, rows)
    tensor = Bnb8bitTensor(rows.file, rows.shape, checkpoint.dtype, sources)
    return TensorGroup(name, tensor, (*names, *checkpoint.existing(module, "weight_format")))


def find_4bit(name: str, checkpoint: QuantFormat) -> TensorGroup | None:
    states = checkpoint.existing(name, *(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")))
    if not states:
        return None
    nested = checkpoint.existing(name, ".nested_absmax", ".nested_quant_map")
    names = name, f"{name}.absmax", f"{name}.quant_map", *nested
    if missing := [source for source in names if source not in checkpoint.reader.tensors]:
        file = checkpoint.reader.tensors[name].file
        raise UserError(f"{file}: {missing[0]} is missing. Download the checkpoint again.")
    sources = checkpoint.sources(*names)
    try:
        state = json.loads(bytes(checkpoint.reader[states[0]].tolist()))
        shape, dtype = tuple(state["shape"]), CONFIG_DTYPES[state["dtype"]]
        nested_args = (state["nested_blocksize"], float(state["nested_offset"])) if nested else (None, 0.0)
        tensor = Bnb4bitTensor(sources[0].file, shape, dtype, sources, state["blocksize"], *nested_args)
        require_consistent(tensor.has_valid_shapes(), name, sources[0])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        problem = f"{states[0]} is corrupt ({error})"
        raise UserError(f"{sources[0].file}: {problem}. Download the checkpoint again.") from error
    return TensorGroup(name, tensor, (*names, *states))


def exact_tensors(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """Read 4-bit weights in fp32, without rounding: quantizing them again gives the same bits."""
    return {
        name: replace(meta, dtype=torch.float32) if isinstance(meta, Bnb4bitTensor) else meta
        for name, meta in tensors.items()
    }


FINDERS = (find_mxfp4, find_fp8, find_int8_weights, find_4bit)


def require_consistent(condition: bool, name: str, meta: TensorMeta) -> None:
    if not condition:
        problem = f"{name} and its scales have inconsistent shapes or dtypes"
        raise UserError(f"{meta.file}: {problem}. Download the checkpoint again.")


def logical_tensors(
    file_tensors: Mapping[str, TensorMeta], config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, TensorMeta]:
    """Replace groups of quantized tensors by their weights, at the position of the first tensor of a group."""
    groups: dict[str, TensorGroup] = {}
    block = (config.get(QUANTIZATION_KEY) or {}).get("weight_block_size")
    sizes = tuple(block) if isinstance(block, list) and all(isinstance(n, int) and n > 0 for n in block) else ()
    with TensorReader(file_tensors) as reader:
        checkpoint = QuantFormat(reader, sizes, dtype)
        for name in file_tensors:
            for find in FINDERS:
                if (group := find(name, checkpoint)) is not None:
                    groups[name] = group
    used = {name for group in groups.values() for name in group.sources}
    tensors: dict[str, TensorMeta] = {}
    for name, meta in file_tensors.items():
        if name in groups:
            tensors[groups[name].name] = groups[name].tensor
        elif name not in used:
            tensors[name] = meta
    return tensors
