"""Weights in four bits, laid out as bitsandbytes does (arXiv:2305.14314): blocks of 64 numbers and a scale for each.

A weight (..., in) becomes bytes (..., in / 2), two numbers in each, the first in the upper half, and fp32 scales
(..., in / 64), the largest number of each block. Scales may be packed themselves, in 8 bits (see `nest`). All are kept
as bytes: whatever casts a model's numbers leaves them alone.
"""

import ctypes
import importlib
import math
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import experts
from tunekit.kernels.native import library

BLOCK, NESTED = 64, 256  # numbers with one scale; scales with one scale of their own
SMALLEST = 1e-38  # of a block of zeros one can still be divided by this
TABLES = {  # what the sixteen codes stand for
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": tuple(sign * x / 192 for sign in (1, -1) for x in (0, 1, 128, 192, 64, 96, 32, 48)),
}
# Numbers that are decoded at once, and then multiplied while they are in the cache. Whole weights of 4096 x 4096 were
# no faster and want four times the room; tiles of a quarter of this cost products 10 % (benchmarks/results).
TILE = 2**22
SOURCE = Path(__file__).with_name("nf4.cpp")
Step = Callable[[Tensor, Tensor, Tensor, str], Tensor]
DECODERS = {torch.bfloat16: "decode_bf16", torch.float32: "decode_fp32"}


@cache
def table(kind: str, device: torch.device) -> Tensor:
    """The numbers of the codes of four bits (16,)."""
    return torch.tensor(TABLES[kind], device=device)


@cache
def order(kind: str) -> tuple[Tensor, Tensor]:
    """Bounds (15,) halfway between neighbouring numbers, and the code of each of the sixteen, smallest first."""
    numbers, codes = table(kind, torch.device("cpu")).sort(stable=True)
    return (numbers[:-1] + numbers[1:]) / 2, codes.to(torch.uint8)


@cache
def fine(device: torch.device) -> Tensor:
    """256 numbers from -1 to 1, the denser the nearer to zero (arXiv:1511.04561): the codes of 8 bits."""
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middles = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(numbers), device=device)


def quantize(weight: Tensor, kind: str = "nf4") -> tuple[Tensor, Tensor]:
    """Bytes (n / 2,) and scales (n / 64,) of the n numbers of a weight; a last half byte is zero."""
    flat = weight.detach().float().contiguous().view(-1)
    lib = native(flat)
    if lib is None or flat.numel() % BLOCK:
        return quantize_reference(flat, kind)
    packed = torch.empty(flat.numel() // 2, dtype=torch.uint8)
    scales = torch.empty(flat.numel() // BLOCK)
    bounds, codes = order(kind)
    tensors = flat, bounds, codes, packed, scales
    lib.encode(*(t.data_ptr() for t in tensors), len(scales), torch.get_num_threads())
    return packed, scales


def quantize_reference(flat: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    bounds, codes = (t.to(flat.device) for t in order(kind))
    shares, scales = relative(flat, BLOCK)
    found = codes[torch.bucketize(F.pad(shares, (0, len(shares) % 2)), bounds)]
    return found[::2] << 4 | found[1::2], scales


def relative(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Numbers (n,) as shares of the largest of their block, and these. A last block that is shorter is divided, not
    multiplied, and its largest number never below SMALLEST, as bitsandbytes has it."""
    whole, rest = flat[: len(flat) // block * block].view(-1, block), flat[len(flat) // block * block :]
    largest = whole.abs().amax(1)
    shares = (whole * (1.0 / largest.clamp(min=SMALLEST))[:, None]).clamp(-1, 1).view(-1)
    if not len(rest):
        return shares, largest
    last = rest.abs().max().clamp(min=SMALLEST)
    return torch.cat([shares, (rest / last).clamp(-1, 1)]), torch.cat([largest, last[None]])


def nest(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits (n,) for scales, and in fp32 what decodes them: a scale for each 256 of them, then their mean."""
    mean = scales.mean()
    shares, largest = relative(scales - mean, NESTED)
    numbers = fine(scales.device)
    codes = torch.bucketize(shares, (numbers[:-1] + numbers[1:]) / 2).to(torch.uint8)
    return codes, torch.cat([largest, mean[None]])


def unnest(codes: Tensor, outer: Tensor) -> Tensor:
    """The scales that codes (...) stand for, in fp32."""
    flat = fine(codes.device)[codes.view(-1).int()]
    largest = outer[:-1].repeat_interleave(NESTED)[: len(flat)]
    return (flat * largest + outer[-1]).view(codes.shape)


def unpacked_scales(scales: Tensor, outer: Tensor | None) -> Tensor:
    """fp32 scales (..., in / 64) of the bytes that are kept."""
    return scales.view(torch.float32) if outer is None else unnest(scales, outer.view(torch.float32))


def dequantize(
    packed: Tensor, scales: Tensor, outer: Tensor | None = None, kind: str = "nf4", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The numbers (..., in) of bytes (..., in / 2), each rounded once, to `dtype`."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if packed.device.type == "cuda":
        gpu = importlib.import_module("tunekit.kernels.nf4_triton")
        return gpu.dequantize(packed, scales, outer, table(kind, packed.device), fine(packed.device), dtype).view(shape)
    plain = unpacked_scales(scales, outer).flatten(0, -2)
    made = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=dtype, device=packed.device)
    return decode(packed.flatten(0, -2), plain, kind, made).view(shape)


def decode(packed: Tensor, scales: Tensor, kind: str, into: Tensor) -> Tensor:
    """Fill `into` (rows, columns) from bytes and fp32 scales, which may be parts of larger rows."""
    lib = native(packed)
    if lib is None or into.dtype not in DECODERS or packed.stride(1) != 1 or scales.stride(1) != 1:
        return into.copy_(dequantize_reference(packed, scales, kind))
    tensors = packed, scales, table(kind, packed.device), into
    steps = packed.stride(0), scales.stride(0)
    getattr(lib, DECODERS[into.dtype])(*(t.data_ptr() for t in tensors), *scales.shape, *steps, torch.get_num_threads())
    return into


def dequantize_reference(packed: Tensor, scales: Tensor, kind: str) -> Tensor:
    """The same in plain torch, in fp32."""
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)
    numbers = table(kind, packed.device)[codes.int()]
    return (numbers.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


def native(tensor: Tensor) -> ctypes.CDLL | None:
    """The compiled functions, for tensors on the CPU, where they can be had."""
    return compiled() if tensor.device.type == "cpu" else None


@cache
def compiled() -> ctypes.CDLL | None:
    lib = library(SOURCE)
    if lib is not None:
        place, size = ctypes.c_void_p, ctypes.c_int64
        lib.encode.argtypes = [*[place] * 5, size, ctypes.c_int]
        for name in DECODERS.values():
            getattr(lib, name).argtypes = [*[place] * 4, *[size] * 4, ctypes.c_int]
    return lib


class Scratch(threading.local):
    """Room for a tile, kept: in memory that is new to the process decoding would wait for its pages."""

    def __init__(self) -> None:
        self.room: dict[torch.dtype, Tensor] = {}

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if dtype not in self.room or self.room[dtype].numel() < rows * columns:
            self.room[dtype] = torch.empty(rows * columns, dtype=dtype)
        return self.room[dtype][: rows * columns].view(rows, columns)


SCRATCH = Scratch()


def times(x: Tensor, packed: Tensor, scales: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    """x W^T + b on the CPU, some rows of W at a time: (N, in) to (N, out)."""
    rows, columns = len(packed), 2 * packed.shape[1]
    y, step = x.new_empty(len(x), rows), max(1, TILE // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        room = SCRATCH.take(part.stop - start, columns, x.dtype)
        weight = decode(packed[part], scales[part], kind, room).T
        if bias is None:
            torch.mm(x, weight, out=y[:, part])
        else:
            torch.addmm(bias[part], x, weight, out=y[:, part])
    return y


def times_back(grad: Tensor, packed: Tensor, scales: Tensor, kind: str) -> Tensor:
    """grad W on the CPU, some columns of W at a time: (N, out) to (N, in)."""
    rows, blocks = scales.shape
    x, step = grad.new_empty(len(grad), blocks * BLOCK), max(1, TILE // (rows * BLOCK))
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        room = SCRATCH.take(rows, (stop - start) * BLOCK, grad.dtype)
        half = packed[:, start * BLOCK // 2 : stop * BLOCK // 2]
        torch.mm(grad, decode(half, scales[:, start:stop], kind, room), out=x[:, start * BLOCK : stop * BLOCK])
    return x


@torch.library.custom_op("tunekit::nf4_product", mutates_args=())
def product(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None) -> Tensor:
    """x W^T + b: (..., in) to (..., out). No dense weight is kept for the backward pass, nor is `x`."""
    if x.device.type != "cpu":
        return F.linear(x, dequantize(packed, scales, outer, kind, x.dtype), bias)
    y = times(x.flatten(0, -2), packed, unpacked_scales(scales, outer), kind, bias)
    return y.view(*x.shape[:-1], len(packed))


@torch.library.custom_op("tunekit::nf4_product_back", mutates_args=())
def product_back(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str) -> Tensor:
    """grad W: (..., out) to (..., in)."""
    if grad.device.type != "cpu":
        return grad @ dequantize(packed, scales, outer, kind, grad.dtype)
    x = times_back(grad.flatten(0, -2), packed, unpacked_scales(scales, outer), kind)
    return x.view(*grad.shape[:-1], 2 * packed.shape[1])


@product.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@product_back.register_fake
def _(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], 2 * packed.shape[1])


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weight, ctx.kind, _ = inputs
    ctx.save_for_backward(*weight)


def back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    to_x = product_back(grad, *ctx.saved_tensors, ctx.kind) if ctx.needs_input_grad[0] else None
    to_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[5] else None
    return to_x, None, None, None, None, to_bias


product.register_autograd(back, setup_context=keep)


@torch.library.custom_op("tunekit::nf4_grouped", mutates_args=())
def grouped(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    """x W[e]^T of rows (N, in) sorted by expert, of which each has `sizes` (E,): (N, out)."""
    if x.device.type != "cpu":
        return experts.grouped(x, dequantize(packed, scales, outer, kind, x.dtype), sizes)
    return each(times, x, packed, unpacked_scales(scales, outer), sizes, kind, packed.shape[1])


@torch.library.custom_op("tunekit::nf4_grouped_back", mutates_args=())
def grouped_back(
    grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str
) -> Tensor:
    """grad W[e]: (N, out) to (N, in)."""
    if grad.device.type != "cpu":
        return experts.grouped(grad, dequantize(packed, scales, outer, kind, grad.dtype).mT, sizes)
    return each(times_back, grad, packed, unpacked_scales(scales, outer), sizes, kind, 2 * packed.shape[2])


def each(step: Step, x: Tensor, packed: Tensor, scales: Tensor, sizes: Tensor, kind: str, width: int) -> Tensor:
    """`step` for each expert that has rows; no more than a tile of one expert is decoded at a time."""
    parts = zip(x.split(sizes.tolist()), packed, scales, strict=True)
    found = [step(rows, of, by, kind) for rows, of, by in parts if len(rows)]
    return torch.cat(found) if found else x.new_empty(0, width)


@grouped.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    return x.new_empty(len(x), packed.shape[1])


@grouped_back.register_fake
def _(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    return grad.new_empty(len(grad), 2 * packed.shape[2])


def keep_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weight, ctx.kind = inputs
    ctx.save_for_backward(*weight)


def back_grouped(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grouped_back(grad, *ctx.saved_tensors, ctx.kind), None, None, None, None, None


grouped.register_autograd(back_grouped, setup_context=keep_grouped)
