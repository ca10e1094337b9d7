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
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.devices import ACCELERATORS
from tunekit.kernels import fake_mode, grouped_mm
from tunekit.kernels.cpp_extension import load_library
from tunekit.kernels.triton_support import uses_triton

BLOCK, DOUBLE_QUANT_BLOCK = 64, 256  # numbers with one scale; scales with one scale of their own
# Numbers that are quantized at a time in plain torch, which takes 13 bytes of temporary memory for each: 218 MB instead
# of 20 bytes for each number of the whole weight. A multiple of BLOCK and NESTED, so that pieces do not change results.
QUANTIZE_CHUNK = 2**24
MIN_SCALE = 1e-38  # of a block of zeros one can still be divided by this
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
TILE_SIZE = 2**22
# Rows of a product, at most as many as nf4.cpp takes, that are multiplied while codes are looked up: the weight is
# written nowhere. 1 to 4 rows took 0.35 to 0.9 of the time of a bf16 product, 8 rows as long, and 12 rows longer than
# decoding first (benchmarks/results).
MAX_FUSED_ROWS = 8
# The same on a GPU: dequantizing writes and reads four bytes for each half that a product of few rows reads. Where the
# two meet differs among GPUs: `benchmarks/nf4.py gpu` prints a table.
MAX_FUSED_ROWS_GPU = 8
SOURCE = Path(__file__).with_name("nf4.cpp")
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # of which there is compiled code


@cache
def code_values(kind: str, device: torch.device) -> Tensor:
    """The numbers of the codes of four bits (16,)."""
    return torch.tensor(TABLES[kind], device=device)


@cache
def sorted_codes(kind: str) -> tuple[Tensor, Tensor]:
    """Bounds (15,) halfway between neighbouring numbers, and the code of each of the sixteen, smallest first."""
    numbers, codes = code_values(kind, torch.device("cpu")).sort(stable=True)
    return (numbers[:-1] + numbers[1:]) / 2, codes.to(torch.uint8)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """256 numbers from -1 to 1, the denser the nearer to zero (arXiv:1511.04561): the codes of 8 bits."""
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middles = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(numbers), device=device)


@cache
def bounds_and_codes(kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """`order` on a device."""
    bounds, codes = sorted_codes(kind)
    return bounds.to(device), codes.to(device)


def quantize(weight: Tensor, kind: str = "nf4") -> tuple[Tensor, Tensor]:
    """Bytes (n / 2,) and scales (n / 64,) of the n numbers of a weight; a last half byte is zero.

    Temporary memory is bounded: none on CUDA, and a piece of the weight elsewhere.
    """
    flat = weight.detach().reshape(-1)
    if uses_triton(flat):
        return gpu().quantize(flat, *bounds_and_codes(kind, flat.device))
    packed = torch.empty(-(-len(flat) // 2), dtype=torch.uint8, device=flat.device)
    scales = torch.empty(-(-len(flat) // BLOCK), device=flat.device)
    for start in range(0, len(flat), QUANTIZE_CHUNK):
        piece = flat[start : start + QUANTIZE_CHUNK].float()
        bytes_, absmax = quantize_chunk(piece, kind)
        packed[start // 2 : start // 2 + len(bytes_)] = bytes_
        scales[start // BLOCK : start // BLOCK + len(absmax)] = absmax
    return packed, scales


def quantize_chunk(flat: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Bytes and scales of contiguous fp32 numbers (n,)."""
    lib = native_library(flat)
    if lib is None or flat.numel() % BLOCK:
        return quantize_reference(flat, kind)
    packed = torch.empty(flat.numel() // 2, dtype=torch.uint8)
    scales = torch.empty(flat.numel() // BLOCK)
    bounds, codes = sorted_codes(kind)
    tensors = flat, bounds, codes, packed, scales
    lib.encode(*(t.data_ptr() for t in tensors), len(scales), torch.get_num_threads())
    return packed, scales


def quantize_reference(flat: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """`quantize_piece` in plain torch, with about 13 bytes of temporary memory per number."""
    bounds, codes = bounds_and_codes(kind, flat.device)
    shares, scales = normalize_blocks(flat, BLOCK)
    shares = F.pad(shares, (0, 1)) if len(shares) % 2 else shares
    codes = codes[torch.bucketize(shares, bounds, out_int32=True)]
    return codes[::2] << 4 | codes[1::2], scales


def normalize_blocks(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Numbers (n,) as shares of the largest of their block, and these. A last block that is shorter is divided, not
    multiplied, and its largest number never below SMALLEST, as bitsandbytes has it."""
    whole, rest = flat[: len(flat) // block * block].view(-1, block), flat[len(flat) // block * block :]
    largest = whole.abs().amax(1)
    shares = (whole * (1.0 / largest.clamp(min=MIN_SCALE))[:, None]).clamp_(-1, 1).view(-1)
    if not len(rest):
        return shares, largest
    last = rest.abs().max().clamp(min=MIN_SCALE)
    return torch.cat([shares, (rest / last).clamp(-1, 1)]), torch.cat([largest, last[None]])


def double_quantize(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits (n,) for scales, and in fp32 what decodes them: a scale for each 256 of them, then their mean."""
    mean, numbers = scales.mean(), dynamic_map(scales.device)
    bounds = (numbers[:-1] + numbers[1:]) / 2
    codes, outer = torch.empty_like(scales, dtype=torch.uint8), scales.new_empty(-(-len(scales) // DOUBLE_QUANT_BLOCK) + 1)
    for start in range(0, len(scales), QUANTIZE_CHUNK):
        shares, largest = normalize_blocks(scales[start : start + QUANTIZE_CHUNK] - mean, DOUBLE_QUANT_BLOCK)
        codes[start : start + QUANTIZE_CHUNK] = torch.bucketize(shares, bounds, out_int32=True)
        outer[start // DOUBLE_QUANT_BLOCK : start // DOUBLE_QUANT_BLOCK + len(largest)] = largest
    outer[-1] = mean
    return codes, outer


def decode_scales(codes: Tensor, outer: Tensor, first: int = 0) -> Tensor:
    """The fp32 scales of codes (..., n), which may be a part of larger rows; `first` is the place of the first."""
    where = torch.full((), first, device=codes.device)
    for size, stride in zip(codes.shape, codes.stride(), strict=True):
        where = where[..., None] + stride * torch.arange(size, device=codes.device)
    return dynamic_map(codes.device)[codes.int()] * outer[where // DOUBLE_QUANT_BLOCK] + outer[-1]


def unpacked_scales(scales: Tensor, outer: Tensor | None, first: int = 0) -> Tensor:
    """fp32 scales (..., in / 64) of the bytes that are kept."""
    return scales.view(torch.float32) if outer is None else decode_scales(scales, outer.view(torch.float32), first)


class NF4Weight(NamedTuple):
    """A matrix in four bits as it is kept, or a part of one."""

    packed: Tensor  # (out, in / 2)
    scales: Tensor  # (out, in / 16), the bytes of fp32; nested: (out, in / 64)
    outer: Tensor | None  # what decodes nested scales, as bytes
    kind: str
    first: int = 0  # place of the first of these blocks among those that `outer` counts

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def submatrix(self, row: int, column: int, rows: int, columns: int) -> "NF4Weight":
        """So many rows and columns from a place on; columns are whole blocks."""
        bytes_ = 4 if self.outer is None else 1
        start, stop = (at // BLOCK * bytes_ for at in (column, column + columns))
        packed = self.packed[row : row + rows, column // 2 : (column + columns) // 2]
        first = self.first + row * (self.scales.stride(0) // bytes_) + column // BLOCK
        return NF4Weight(packed, self.scales[row : row + rows, start:stop], self.outer, self.kind, first)

    def dequantize_fp32(self) -> Tensor:
        """The same in plain torch, in fp32."""
        scales = unpacked_scales(self.scales, self.outer, self.first)
        return dequantize_reference(self.packed, scales, self.kind)

    def native_args(self) -> tuple[int | None, ...]:
        """What the compiled functions want to know of bytes and scales."""
        if self.outer is None:
            return self.packed.data_ptr(), self.scales.data_ptr(), None, None, 0, 0, self.scales.stride(0) // 4
        tables = self.outer.data_ptr(), dynamic_map(self.packed.device).data_ptr(), self.outer.numel() // 4 - 1
        return self.packed.data_ptr(), self.scales.data_ptr(), *tables, self.first, self.scales.stride(0)


def dequantize(
    packed: Tensor, scales: Tensor, outer: Tensor | None = None, kind: str = "nf4", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The numbers (..., in) of bytes (..., in / 2), each rounded once, to `dtype`."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if uses_triton(packed):
        tables = code_values(kind, packed.device), dynamic_map(packed.device)
        return gpu().dequantize(packed, scales, outer, *tables, dtype).view(shape)
    made = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=dtype, device=packed.device)
    weight = NF4Weight(packed.flatten(0, -2).contiguous(), scales.flatten(0, -2).contiguous(), outer, kind)
    return decode(weight, made).view(shape)


def decode(weight: NF4Weight, into: Tensor) -> Tensor:
    """Fill `into` (rows, columns) with the numbers of a matrix."""
    lib = native_library(weight.packed)
    if lib is None or into.dtype not in DTYPES or weight.packed.stride(1) != 1 or weight.scales.stride(1) != 1:
        return into.copy_(weight.dequantize_fp32())
    tables = code_values(weight.kind, into.device).data_ptr(), into.data_ptr()
    rows, columns = weight.shape
    sizes = rows, columns // BLOCK, weight.packed.stride(0), torch.get_num_threads()
    getattr(lib, f"decode_{DTYPES[into.dtype]}")(*weight.native_args(), *tables, *sizes)
    return into


def dequantize_reference(packed: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Numbers of bytes and fp32 scales in plain torch, in fp32."""
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)
    numbers = code_values(kind, packed.device)[codes.int()]
    return (numbers.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


def native_library(tensor: Tensor) -> ctypes.CDLL | None:
    """The compiled functions, for tensors on the CPU, where they can be had."""
    return compiled() if tensor.device.type == "cpu" and not fake_mode.is_fake() else None


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        place, size = ctypes.c_void_p, ctypes.c_int64
        weight = [*[place] * 4, *[size] * 3]
        lib.encode.argtypes = [*[place] * 5, size, ctypes.c_int]
        for name in DTYPES.values():
            getattr(lib, f"decode_{name}").argtypes = [*weight, *[place] * 2, *[size] * 3, ctypes.c_int]
            getattr(lib, f"few_{name}").argtypes = [place, *weight, *[place] * 3, *[size] * 4, ctypes.c_int]
            getattr(lib, f"few_{name}_able").restype = ctypes.c_bool
    return lib


@cache
def gpu() -> ModuleType:
    """What runs on a GPU, which is loaded only where there is one."""
    return importlib.import_module("tunekit.kernels.nf4_triton")


class ScratchBuffer(threading.local):
    """Room for a tile, kept: in memory that is new to the process decoding would wait for its pages."""

    def __init__(self) -> None:
        self.room: dict[torch.dtype, Tensor] = {}

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if dtype not in self.room or self.room[dtype].numel() < rows * columns:
            self.room[dtype] = torch.empty(rows * columns, dtype=dtype)
        return self.room[dtype][: rows * columns].view(rows, columns)


SCRATCH = ScratchBuffer()


def max_fused_rows(x: Tensor) -> int:
    """How many such rows are multiplied while codes are looked up: none where the processor cannot."""
    lib = native_library(x) if x.dtype in DTYPES else None
    return MAX_FUSED_ROWS if lib is not None and getattr(lib, f"few_{DTYPES[x.dtype]}_able")() else 0


def matmul_tiled(x: Tensor, weight: NF4Weight, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Put x W^T + b (N, out) of x (N, in) on the CPU into `y`, some rows of W at a time."""
    if len(x) <= max_fused_rows(x):
        return matmul_fused(x.contiguous(), weight, y, bias)
    rows, columns = weight.shape
    step = max(1, TILE_SIZE // columns)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        numbers = decode(weight.submatrix(start, 0, count, columns), SCRATCH.take(count, columns, x.dtype)).T
        into = y[:, start : start + count]
        if bias is None:
            torch.mm(x, numbers, out=into)
        else:
            torch.addmm(bias[start : start + count], x, numbers, out=into)
    return y


def matmul_fused(x: Tensor, weight: NF4Weight, y: Tensor, bias: Tensor | None) -> Tensor:
    """The same for a few rows, such as those of generation: what is read is four bits a number."""
    run = getattr(compiled(), f"few_{DTYPES[x.dtype]}")
    told = *weight.native_args(), code_values(weight.kind, x.device).data_ptr(), None if bias is None else bias.data_ptr()
    rows, columns = weight.shape
    sizes = rows, columns // BLOCK, weight.packed.stride(0), torch.get_num_threads()
    run(x.data_ptr(), *told, y.data_ptr(), x.numel() // columns, *sizes)
    return y


def matmul_backward_tiled(grad: Tensor, weight: NF4Weight, x: Tensor) -> Tensor:
    """Put grad W (N, in) of grad (N, out) on the CPU into `x`, some columns of W at a time."""
    rows, columns = weight.shape
    step = max(1, TILE_SIZE // (rows * BLOCK)) * BLOCK
    for start in range(0, columns, step):
        count = min(step, columns - start)
        numbers = decode(weight.submatrix(0, start, rows, count), SCRATCH.take(rows, count, grad.dtype))
        torch.mm(grad, numbers, out=x[:, start : start + count])
    return x


def register_operator(name: str, schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """An operator that torch.compile sees whole. Gradients are those of autograd functions, at a third of the cost of
    `torch.library.custom_op` with `register_autograd`: 13 microseconds a call, and 39."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        torch.library.define(f"tunekit::{name}", schema)
        torch.library.impl(f"tunekit::{name}", ("cpu", *ACCELERATORS))(function)
        return getattr(torch.ops.tunekit, name).default

    return register


@register_operator("nf4_product", "(Tensor x, Tensor packed, Tensor scales, Tensor? outer, str kind, Tensor? bias) -> Tensor")
def forward(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None) -> Tensor:
    if 0 < x.numel() <= MAX_FUSED_ROWS_GPU * x.shape[-1] and uses_triton(x):
        tables = code_values(kind, x.device), dynamic_map(x.device)
        return gpu().few(x.flatten(0, -2), (packed, scales, outer), *tables, bias).view(*x.shape[:-1], -1)
    if x.device.type != "cpu":
        return F.linear(x, dequantize(packed, scales, outer, kind, x.dtype), bias)
    y = x.new_empty(*x.shape[:-1], len(packed))
    matmul_tiled(x.flatten(0, -2), NF4Weight(packed, scales, outer, kind), y.flatten(0, -2), bias)
    return y


@register_operator("nf4_product_back", "(Tensor grad, Tensor packed, Tensor scales, Tensor? outer, str kind) -> Tensor")
def matmul_backward(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str) -> Tensor:
    """grad W: (..., out) to (..., in)."""
    if grad.device.type != "cpu":
        return grad @ dequantize(packed, scales, outer, kind, grad.dtype)
    x = grad.new_empty(*grad.shape[:-1], 2 * packed.shape[1])
    matmul_backward_tiled(grad.flatten(0, -2), NF4Weight(packed, scales, outer, kind), x.flatten(0, -2))
    return x


@torch.library.register_fake("tunekit::nf4_product")
def _(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@torch.library.register_fake("tunekit::nf4_product_back")
def _(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], 2 * packed.shape[1])


class NF4Matmul(torch.autograd.Function):
    """No dense weight is kept for the backward pass, nor is `x`.

    Arguments have names: where no input needs a gradient, the compiler of torch compares the number of arguments with
    that of parameters, counts `*more` as one, and leaves out `ctx`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, outer)
        ctx.kind = kind
        return forward(x, packed, scales, outer, kind, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_x = matmul_backward(grads[0], *ctx.saved_tensors, ctx.kind) if ctx.needs_input_grad[0] else None
        to_bias = grads[0].flatten(0, -2).sum(0) if ctx.needs_input_grad[5] else None
        return to_x, None, None, None, None, to_bias


def matmul(
    x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None = None
) -> Tensor:
    """x W^T + b: (..., in) to (..., out)."""
    if torch.is_grad_enabled():
        return NF4Matmul.apply(x, packed, scales, outer, kind, bias)
    if torch.compiler.is_compiling() or not 0 < x.numel() <= max_fused_rows(x) * x.shape[-1]:
        return forward(x, packed, scales, outer, kind, bias)
    # Generation comes here for every layer and token, where an operator of torch takes as long as the work itself.
    return matmul_fused(
        x.contiguous(), NF4Weight(packed, scales, outer, kind), x.new_empty(*x.shape[:-1], len(packed)), bias
    )


@register_operator("nf4_grouped", "(Tensor x, Tensor packed, Tensor scales, Tensor? outer, Tensor sizes, str kind) -> Tensor")
def forward_grouped(
    x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str
) -> Tensor:
    if x.device.type != "cpu":
        return grouped_mm.grouped_mm(x, dequantize(packed, scales, outer, kind, x.dtype), sizes)
    return for_each_expert(matmul_tiled, x, NF4Weight(packed, scales, outer, kind), sizes, packed.shape[1])


@register_operator(
    "nf4_grouped_back", "(Tensor grad, Tensor packed, Tensor scales, Tensor? outer, Tensor sizes, str kind) -> Tensor"
)
def grouped_matmul_backward(
    grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str
) -> Tensor:
    if grad.device.type != "cpu":
        return grouped_mm.grouped_mm(grad, dequantize(packed, scales, outer, kind, grad.dtype).mT, sizes)
    return for_each_expert(matmul_backward_tiled, grad, NF4Weight(packed, scales, outer, kind), sizes, 2 * packed.shape[2])


def for_each_expert(step: Callable[..., Tensor], x: Tensor, weights: NF4Weight, sizes: Tensor, width: int) -> Tensor:
    """`step` for each expert that has rows; no more than a tile of one expert is decoded at a time."""
    made, at = x.new_empty(len(x), width), 0
    blocks = weights.packed.shape[1] * weights.packed.shape[2] * 2 // BLOCK
    for expert, count in enumerate(sizes.tolist()):
        if count:
            of = NF4Weight(weights.packed[expert], weights.scales[expert], *weights[2:4], expert * blocks)
            step(x[at : at + count], of, made[at : at + count])
            at += count
    return made


@torch.library.register_fake("tunekit::nf4_grouped")
def _(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    return x.new_empty(len(x), packed.shape[1])


@torch.library.register_fake("tunekit::nf4_grouped_back")
def _(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    return grad.new_empty(len(grad), 2 * packed.shape[2])


class NF4GroupedMM(torch.autograd.Function):
    """The same for rows that are sorted by expert. Arguments have names as in `NF4Matmul`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, outer, sizes)
        ctx.kind = kind
        return forward_grouped(x, packed, scales, outer, sizes, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grouped_matmul_backward(grads[0], *ctx.saved_tensors, ctx.kind), None, None, None, None, None


def grouped_matmul(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    """x W[e]^T of rows (N, in) sorted by expert, of which each has `sizes` (E,): (N, out)."""
    run = NF4GroupedMM.apply if torch.is_grad_enabled() else forward_grouped
    return run(x, packed, scales, outer, sizes, kind)
