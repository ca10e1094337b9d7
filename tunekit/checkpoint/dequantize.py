"""Packed checkpoints as if they were plain: several tensors of the files are one of the model, decoded when it is read.

Which tensors are packed, the tensors tell: they come in groups of fixed names. What is made of a group is compared, bit
for bit, with what transformers and bitsandbytes make of it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tunekit.checkpoint.safetensors_io import NAMES, OpenFiles, TensorMeta, TensorReader
from tunekit.errors import UserError

PACKED = "quantization_config"  # the key of config.json
METHODS = ("mxfp4", "fp8", "bitsandbytes")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of four bits, without their sign
MXFP4_BLOCK, BIAS = 32, 127  # numbers with one scale; what is taken off a stored exponent
INT8 = 1 / 127
CHUNK = 2**19  # numbers that are decoded at a time: what is made on the way stays in the cache


def check_quant_format(config: Mapping[str, Any], where: str) -> None:
    """Refuse what is packed in a way that is not read."""
    told = config.get(PACKED)
    method = told.get("quant_method", "bitsandbytes") if isinstance(told, dict) else told
    if told and method not in METHODS:
        raise UserError(
            f"{where}: the weights are packed by {method!r}, which is not read ({', '.join(METHODS)} are); "
            "take the checkpoint from which it was made"
        )


@dataclass(frozen=True)
class PrequantizedTensor(TensorMeta):
    """One tensor of the model, and those of the files that hold it."""

    parts: tuple[TensorMeta, ...]

    def read(self, files: OpenFiles) -> Tensor:
        return self.decode([part.read(files) for part in self.parts])

    def decode(self, parts: list[Tensor]) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class MXFP4Tensor(PrequantizedTensor):
    """gpt-oss: blocks (E, out, in / 32, 16) of two numbers a byte, the lower half first, and exponents of 2 beside.

    The model has (E, in, out).
    """

    def decode(self, parts: list[Tensor]) -> Tensor:
        blocks, scales = parts
        table = pairs(torch.tensor((*E2M1, *(-x for x in E2M1))), low_first=True).to(self.dtype)
        whole = torch.empty(*blocks.shape[:2], self.shape[1], dtype=self.dtype)
        rows = max(1, CHUNK // self.shape[1])
        for at in range(0, blocks.shape[0] * blocks.shape[1], rows):
            some, block, scale = (t.flatten(0, 1)[at : at + rows] for t in (whole, blocks, scales))
            exponents = torch.pow(2.0, scale.int() - BIAS)[..., None]
            torch.mul(unpacked(block, table), exponents, out=some.view_as(exponents.expand(-1, -1, MXFP4_BLOCK)))
        return whole.mT


@dataclass(frozen=True)
class FP8BlockTensor(PrequantizedTensor):
    """Numbers of 8 bits (..., out, in), and a scale for each block of them or for all."""

    block: tuple[int, ...] | None  # None: one scale for all

    def decode(self, parts: list[Tensor]) -> Tensor:
        packed, scales = parts[0], parts[1].float()
        if self.block is None:
            return (packed.float() * scales).to(self.dtype)
        whole, (rows, columns) = torch.empty(self.shape, dtype=self.dtype), self.block
        for i, scale in enumerate(scales.unbind(-2)):
            some = (..., slice(i * rows, (i + 1) * rows), slice(None))
            whole[some] = packed[some].float() * scale.repeat_interleave(columns, -1)[..., None, : self.shape[-1]]
        return whole


@dataclass(frozen=True)
class Bnb4bitTensor(PrequantizedTensor):
    """bitsandbytes: two numbers a byte, the upper half first, which stand in a table of 16; a scale for each block.

    The scales may be packed themselves, in 8 bits with a table, scales and an offset of their own.
    """

    block: int
    nested_block: int | None
    offset: float

    def fits(self) -> bool:
        """Whether there is just what this many numbers need."""
        packed, scales, table, *nested = self.parts
        count = math.prod(self.shape)
        blocks = -(-count // self.block)
        outer = -(-blocks // self.nested_block) if self.nested_block else 0
        return (
            math.prod(packed.shape) * packed.dtype.itemsize == -(-count // 2)
            and scales.shape == (blocks,)
            and table.shape == (16,)
            and [part.shape for part in nested] == ([(outer,), (256,)] if self.nested_block else [])
        )

    def decode(self, parts: list[Tensor]) -> Tensor:
        packed, scales, table, *nested = parts
        if self.nested_block is not None:
            outer, outer_table = nested
            scales = scaled(outer_table[scales.long()], outer, self.nested_block) + self.offset
        packed, table = packed.view(torch.uint8).flatten(), pairs(table, low_first=False)
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
        blocks = max(1, CHUNK // self.block)
        for at in range(0, len(scales), blocks):
            first, some = at * self.block, slice(at, at + blocks)
            out = whole[first : first + blocks * self.block]
            numbers = unpacked(packed[first // 2 : (first + len(out) + 1) // 2], table)[: len(out)]
            out.copy_(scaled(numbers, scales[some], self.block))
        return whole.view(self.shape)


@dataclass(frozen=True)
class Bnb8bitTensor(PrequantizedTensor):
    """LLM.int8: a byte a number, and the largest number of each row."""

    def decode(self, parts: list[Tensor]) -> Tensor:
        rows, largest = parts
        return (rows * largest[:, None] * INT8).to(self.dtype)


def pairs(table: Tensor, low_first: bool) -> Tensor:
    """The two numbers of every byte (256, 2), from those of every half of a byte (16,)."""
    halves = torch.arange(256)[:, None] >> torch.tensor([0, 4] if low_first else [4, 0]) & 15
    return table[halves]


def unpacked(packed: Tensor, table: Tensor) -> Tensor:
    """(..., bytes) to (..., 2 bytes) numbers."""
    # A pair is looked up as one wide number: 2.4 times as fast as two numbers (970 million in bf16 a second on a core).
    wide = table.view({2: torch.int32, 4: torch.int64}[table.itemsize]).flatten()
    return wide.index_select(0, packed.flatten().int()).view(table.dtype).view(*packed.shape[:-1], -1)


def scaled(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """Every `block` numbers (n,) times their scale; the last block may be shorter."""
    whole = len(numbers) // block * block
    if whole == len(numbers):
        return (numbers.view(-1, block) * scales[:, None]).flatten()
    return torch.cat([scaled(numbers[:whole], scales[: whole // block], block), numbers[whole:] * scales[-1]])


@dataclass(frozen=True)
class TensorGroup:
    """A packed tensor under its name in the model, and the names of all that it takes from the files."""

    name: str
    packed: PrequantizedTensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class QuantFormat:
    """What a packed tensor is recognized by."""

    reader: TensorReader
    block: tuple[int, ...]  # of FP8, as config.json says
    dtype: torch.dtype  # of the model

    def parts(self, *names: str) -> tuple[TensorMeta, ...]:
        return tuple(self.reader.tensors[name] for name in names)

    def beside(self, module: str, *leaves: str) -> tuple[str, ...]:
        """Which of these a module has."""
        return tuple(module + leaf for leaf in leaves if module + leaf in self.reader.tensors)


def mxfp4(name: str, of: QuantFormat) -> TensorGroup | None:
    base = name.removesuffix("_blocks")
    names = name, f"{base}_scales"
    if base == name or names[1] not in of.reader.tensors:
        return None
    blocks, scales = parts = of.parts(*names)
    sound(blocks.shape == (*scales.shape, MXFP4_BLOCK // 2) and len(scales.shape) == 3, name, blocks)
    experts, rows, groups = scales.shape
    return TensorGroup(base, MXFP4Tensor(blocks.file, (experts, groups * MXFP4_BLOCK, rows), of.dtype, parts), names)


def fp8(name: str, of: QuantFormat) -> TensorGroup | None:
    names = name, f"{name}_scale_inv"
    if names[1] not in of.reader.tensors:
        return None
    whole, scales = parts = of.parts(*names)
    sound(whole.dtype == torch.float8_e4m3fn and scales.dtype.is_floating_point, name, whole)
    block = None if math.prod(scales.shape) == 1 else of.block
    if block is not None:
        sound(len(block) == 2 and len(whole.shape) > 1, name, whole)
        tiles = tuple(-(-size // tile) for size, tile in zip(whole.shape[-2:], block, strict=True))
        sound(scales.shape == (*whole.shape[:-2], *tiles), name, whole)
    others = of.beside(name.removesuffix("weight"), "activation_scale", "input_scale")
    return TensorGroup(name, FP8BlockTensor(whole.file, whole.shape, of.dtype, parts, block), (*names, *others))


def int8(name: str, of: QuantFormat) -> TensorGroup | None:
    module = name.removesuffix("weight")
    names = name, f"{module}SCB"
    if module == name or names[1] not in of.reader.tensors:
        return None
    rows, largest = parts = of.parts(*names)
    sound(rows.dtype == torch.int8 and len(rows.shape) == 2 and largest.shape == rows.shape[:1], name, rows)
    return TensorGroup(
        name, Bnb8bitTensor(rows.file, rows.shape, of.dtype, parts), (*names, *of.beside(module, "weight_format"))
    )


def four_bit(name: str, of: QuantFormat) -> TensorGroup | None:
    states = of.beside(name, *(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")))
    if not states:
        return None
    nested = of.beside(name, ".nested_absmax", ".nested_quant_map")
    names = name, f"{name}.absmax", f"{name}.quant_map", *nested
    if missing := [one for one in names if one not in of.reader.tensors]:
        raise UserError(f"{of.reader.tensors[name].file}: {missing[0]} is missing; download it again")
    parts = of.parts(*names)
    try:
        told = json.loads(bytes(of.reader[states[0]].tolist()))
        shape, dtype = tuple(told["shape"]), NAMES[told["dtype"]]
        inner = (told["nested_blocksize"], float(told["nested_offset"])) if nested else (None, 0.0)
        packed = Bnb4bitTensor(parts[0].file, shape, dtype, parts, told["blocksize"], *inner)
        sound(packed.fits(), name, parts[0])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"{parts[0].file}: {states[0]} is damaged ({error}); download it again") from error
    return TensorGroup(name, packed, (*names, *states))


def exact_tensors(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """Tensors of four bits as they are decoded, before they are rounded: quantized again, they are what they were."""
    return {name: replace(t, dtype=torch.float32) if isinstance(t, Bnb4bitTensor) else t for name, t in tensors.items()}


CODECS = (mxfp4, fp8, int8, four_bit)


def sound(is_so: bool, name: str, stored: TensorMeta) -> None:
    if not is_so:
        raise UserError(f"{stored.file}: {name} and its scales do not fit together; download it again")


def logical_tensors(
    raw: Mapping[str, TensorMeta], config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, TensorMeta]:
    """The tensors that the model has, each in the place of the first of those that hold it."""
    made: dict[str, TensorGroup] = {}
    block = (config.get(PACKED) or {}).get("weight_block_size")
    sizes = tuple(block) if isinstance(block, list) and all(isinstance(n, int) and n > 0 for n in block) else ()
    with TensorReader(raw) as reader:
        of = QuantFormat(reader, sizes, dtype)
        for name in raw:
            for codec in CODECS:
                if (packed := codec(name, of)) is not None:
                    made[name] = packed
    used = {name for packed in made.values() for name in packed.names}
    found: dict[str, TensorMeta] = {}
    for name, stored in raw.items():
        if name in made:
            found[made[name].name] = made[name].packed
        elif name not in used:
            found[name] = stored
    return found
