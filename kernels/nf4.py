"""4-bit weights (NF4 and FP4) in the layout of bitsandbytes (arXiv:2305.14314): one scale per block of 64 values.

A weight (..., in) becomes bytes (..., in / 2) with two codes each, the first one in the upper half, and fp32 scales
(..., in / 64), the maximum magnitude of each block. Scales may be quantized to 8 bits as well (`double_quantize`). All
tensors are stored as uint8, so that casting a model does not change them.
"""

import ctypes
import math
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.devices import ACCELERATORS
from tunekit.kernels import fake_mode, grouped_mm
from tunekit.kernels.argument_checks import check_contiguous, check_tensor
from tunekit.kernels.cpp_extension import DTYPES, load_library
from tunekit.kernels.nf4_codes import code_values, dynamic_map, midpoints_and_codes
from tunekit.kernels.triton_support import triton_kernels, uses_triton

BLOCK, DOUBLE_QUANT_BLOCK = 64, 256  # weights per scale; scales per scale of the second level
# Values that the torch reference quantizes at a time. It needs 13 bytes of temporary memory per value: 218 MB instead
# of 20 bytes per value of the full weight. A multiple of both block sizes, so that chunks do not change results.
QUANTIZE_CHUNK = 2**24
MIN_SCALE = 1e-38  # avoids division by zero in blocks of zeros
# Values that are dequantized at a time, and multiplied while they are in the cache. Dequantizing full weights of
# 4096 x 4096 was no faster and needs 4 times the memory; tiles of a quarter were 10% slower (benchmarks/results).
TILE_SIZE = 2**22
# Maximum number of rows for the fused kernel of nf4.cpp, which does not write the dequantized weight to memory. 1 to 4
# rows took 0.35 to 0.9 of the time of a bf16 matmul, 8 rows the same time, and 12 rows longer than dequantizing first
# (benchmarks/results).
MAX_FUSED_ROWS = 8
SOURCE = Path(__file__).with_name("nf4.cpp")


def quantize(weight: Tensor, kind: str = "nf4") -> tuple[Tensor, Tensor]:
    """Quantize a weight of n values to bytes (n / 2,) and fp32 scales (n / 64,). For odd n, the last half byte is zero.

    Temporary memory is bounded: none on CUDA, that of a chunk elsewhere.
    """
    flat = weight.detach().reshape(-1).contiguous()
    if uses_triton(flat):
        return triton_kernels("nf4").quantize(flat, *midpoints_and_codes(kind, flat.device))
    packed = torch.empty(-(-len(flat) // 2), dtype=torch.uint8, device=flat.device)
    scales = torch.empty(-(-len(flat) // BLOCK), device=flat.device)
    for start in range(0, len(flat), QUANTIZE_CHUNK):
        chunk = flat[start : start + QUANTIZE_CHUNK].float()
        bytes_, absmax = quantize_chunk(chunk, kind)
        packed[start // 2 : start // 2 + len(bytes_)] = bytes_
        scales[start // BLOCK : start // BLOCK + len(absmax)] = absmax
    return packed, scales


def quantize_chunk(flat: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize contiguous fp32 values (n,) to bytes and scales."""
    lib = native_library(flat)
    if lib is None or flat.numel() % BLOCK:
        return quantize_reference(flat, kind)
    packed = torch.empty(flat.numel() // 2, dtype=torch.uint8)
    scales = torch.empty(flat.numel() // BLOCK)
    midpoints, codes = midpoints_and_codes(kind, flat.device)
    tensors = flat, midpoints, codes, packed, scales
    lib.quantize(*(t.data_ptr() for t in tensors), len(scales), torch.get_num_threads())
    return packed, scales


def quantize_reference(flat: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Torch reference of `quantize_chunk`, with about 13 bytes of temporary memory per value."""
    midpoints, codes = midpoints_and_codes(kind, flat.device)
    ratios, scales = normalize_blocks(flat, BLOCK)
    ratios = F.pad(ratios, (0, 1)) if len(ratios) % 2 else ratios
    codes = codes[torch.bucketize(ratios, midpoints, out_int32=True)]
    return codes[::2] << 4 | codes[1::2], scales


def normalize_blocks(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Values (n,) divided by the maximum magnitude of their block, and these maxima.

    As in bitsandbytes, a shorter last block is divided instead of multiplied, and its maximum is at least MIN_SCALE.
    """
    full_blocks, tail = flat[: len(flat) // block * block].view(-1, block), flat[len(flat) // block * block :]
    absmax = full_blocks.abs().amax(1)
    ratios = (full_blocks * (1.0 / absmax.clamp(min=MIN_SCALE))[:, None]).clamp_(-1, 1).view(-1)
    if not len(tail):
        return ratios, absmax
    tail_absmax = tail.abs().max().clamp(min=MIN_SCALE)
    return torch.cat([ratios, (tail / tail_absmax).clamp(-1, 1)]), torch.cat([absmax, tail_absmax[None]])


def double_quantize(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize fp32 scales (n,) to codes (n,) uint8. The second result (n / 256 + 1,) has their scales and the mean."""
    mean, values = scales.mean(), dynamic_map(scales.device)
    midpoints = (values[:-1] + values[1:]) / 2
    codes = torch.empty_like(scales, dtype=torch.uint8)
    outer_scales = scales.new_empty(-(-len(scales) // DOUBLE_QUANT_BLOCK) + 1)
    for start in range(0, len(scales), QUANTIZE_CHUNK):
        ratios, absmax = normalize_blocks(scales[start : start + QUANTIZE_CHUNK] - mean, DOUBLE_QUANT_BLOCK)
        codes[start : start + QUANTIZE_CHUNK] = torch.bucketize(ratios, midpoints, out_int32=True)
        outer_scales[start // DOUBLE_QUANT_BLOCK : start // DOUBLE_QUANT_BLOCK + len(absmax)] = absmax
    outer_scales[-1] = mean
    return codes, outer_scales


def decode_scales(codes: Tensor, outer_scales: Tensor, first: int = 0) -> Tensor:
    """Decode codes (..., n) to fp32 scales. Codes may be a view of larger rows; `first` is the index of its start."""
    index = torch.full((), first, device=codes.device)
    for size, stride in zip(codes.shape, codes.stride(), strict=True):
        index = index[..., None] + stride * torch.arange(size, device=codes.device)
    return dynamic_map(codes.device)[codes.int()] * outer_scales[index // DOUBLE_QUANT_BLOCK] + outer_scales[-1]


def unpack_scales(scales: Tensor, outer_scales: Tensor | None, first: int = 0) -> Tensor:
    """fp32 scales (..., in / 64) from their stored bytes."""
    if outer_scales is None:
        return scales.view(torch.float32)
    return decode_scales(scales, outer_scales.view(torch.float32), first)


class NF4Weight(NamedTuple):
    """Quantized matrix, or a submatrix of one."""

    packed: Tensor  # (out, in / 2) uint8
    scales: Tensor  # (out, in / 16), bytes of fp32; with double quantization (out, in / 64)
    outer_scales: Tensor | None  # bytes of the second-level scales and the mean
    kind: str
    first: int = 0  # index of the first block among the blocks of the full weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def submatrix(self, row: int, column: int, rows: int, columns: int) -> "NF4Weight":
        """Submatrix that starts at (row, column); columns must be multiples of the block size."""
        bytes_per_scale = 4 if self.outer_scales is None else 1
        start, stop = (index // BLOCK * bytes_per_scale for index in (column, column + columns))
        packed = self.packed[row : row + rows, column // 2 : (column + columns) // 2]
        first = self.first + row * (self.scales.stride(0) // bytes_per_scale) + column // BLOCK
        return NF4Weight(packed, self.scales[row : row + rows, start:stop], self.outer_scales, self.kind, first)

    def dequantize_fp32(self) -> Tensor:
        """Torch reference: dequantized matrix in fp32."""
        scales = unpack_scales(self.scales, self.outer_scales, self.first)
        return dequantize_reference(self.packed, scales, self.kind)

    def check(self) -> None:
        """Raise ValueError unless the scales fit the codes, in the layout that nf4.cpp reads."""
        packed, scales, outer_scales = self.packed, self.scales, self.outer_scales
        blocks, is_single = packed.shape[1] // (BLOCK // 2), outer_scales is None
        check_tensor("nf4", "packed", packed, (packed.shape[0], blocks * (BLOCK // 2)), torch.uint8, packed.device)
        shape = packed.shape[0], 4 * blocks if is_single else blocks
        check_tensor("nf4", "scales", scales, shape, torch.uint8, packed.device)
        stride, step = scales.stride()
        if packed.stride(1) != 1 or step != 1 or (is_single and (stride | scales.data_ptr()) % 4):
            raise ValueError(f"nf4: packed or scales has strides {packed.stride()}, {scales.stride()}, not of rows")
        if outer_scales is not None:
            last_block = self.first + (shape[0] - 1) * stride + blocks - 1
            check_tensor("nf4", "outer_scales", outer_scales, outer_scales.shape[:1], torch.uint8, packed.device)
            check_contiguous("nf4", "outer_scales", outer_scales)
            if last_block // DOUBLE_QUANT_BLOCK > outer_scales.numel() // 4 - 2 or outer_scales.data_ptr() % 4:
                raise ValueError(
                    f"nf4: outer_scales has shape {tuple(outer_scales.shape)}, not fp32 of {last_block + 1} scales"
                )

    def native_args(self) -> tuple[int | None, ...]:
        """Pointers and sizes of this matrix, as the functions of nf4.cpp take them."""
        self.check()
        if self.outer_scales is None:
            return self.packed.data_ptr(), self.scales.data_ptr(), None, None, 0, 0, self.scales.stride(0) // 4
        tables = (
            self.outer_scales.data_ptr(),
            dynamic_map(self.packed.device).data_ptr(),
            self.outer_scales.numel() // 4 - 1,
        )
        return self.packed.data_ptr(), self.scales.data_ptr(), *tables, self.first, self.scales.stride(0)


def dequantize(
    packed: Tensor,
    scales: Tensor,
    outer_scales: Tensor | None = None,
    kind: str = "nf4",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantize bytes (..., in / 2) to a weight (..., in), rounded once to `dtype`."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if uses_triton(packed):
        tables = code_values(kind, packed.device), dynamic_map(packed.device)
        return triton_kernels("nf4").dequantize(packed, scales, outer_scales, *tables, dtype).view(shape)
    output = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=dtype, device=packed.device)
    weight = NF4Weight(packed.flatten(0, -2).contiguous(), scales.flatten(0, -2).contiguous(), outer_scales, kind)
    return decode(weight, output).view(shape)


def decode(weight: NF4Weight, out: Tensor) -> Tensor:
    """Dequantize a matrix into `out` (rows, columns)."""
    lib = native_library(weight.packed)
    if lib is None or out.dtype not in DTYPES or weight.packed.stride(1) != 1 or weight.scales.stride(1) != 1:
        return out.copy_(weight.dequantize_fp32())
    tables = code_values(weight.kind, out.device).data_ptr(), out.data_ptr()
    rows, columns = weight.shape
    check_tensor("nf4", "out", out, (rows, columns), out.dtype, weight.packed.device)
    check_contiguous("nf4", "out", out)
    sizes = rows, columns // BLOCK, weight.packed.stride(0), torch.get_num_threads()
    getattr(lib, f"dequantize_{DTYPES[out.dtype]}")(*weight.native_args(), *tables, *sizes)
    return out


def dequantize_reference(packed: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Torch reference of `dequantize` with fp32 scales; returns fp32."""
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)
    values = code_values(kind, packed.device)[codes.int()]
    return (values.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


def native_library(x: Tensor) -> ctypes.CDLL | None:
    """The compiled library if it is available and the tensor is on the CPU, else None."""
    return compiled() if x.device.type == "cpu" and not fake_mode.is_fake() else None


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        weight = [*[pointer] * 4, *[size] * 3]
        lib.quantize.argtypes = [*[pointer] * 5, size, ctypes.c_int]
        for name in DTYPES.values():
            getattr(lib, f"dequantize_{name}").argtypes = [*weight, *[pointer] * 2, *[size] * 3, ctypes.c_int]
            getattr(lib, f"matmul_{name}").argtypes = [pointer, *weight, *[pointer] * 3, *[size] * 4, ctypes.c_int]
            getattr(lib, f"is_matmul_supported_{name}").restype = ctypes.c_bool
    return lib


class ScratchBuffer(threading.local):
    """Reusable memory for a tile of each dtype: new memory would cost page faults in each call."""

    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Tensor] = {}

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if dtype not in self.buffers or self.buffers[dtype].numel() < rows * columns:
            with torch.inference_mode(False):  # generation and training use the same memory
                self.buffers[dtype] = torch.empty(rows * columns, dtype=dtype)
        return self.buffers[dtype][: rows * columns].view(rows, columns)


SCRATCH = ScratchBuffer()


def max_fused_rows(x: Tensor) -> int:
    """Maximum number of rows of the fused matmul for this dtype; 0 if the CPU does not support it."""
    lib = native_library(x) if x.dtype in DTYPES else None
    return MAX_FUSED_ROWS if lib is not None and getattr(lib, f"is_matmul_supported_{DTYPES[x.dtype]}")() else 0


def matmul_tiled(x: Tensor, weight: NF4Weight, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Write x W^T + b (N, out) to `y` for x (N, in) on the CPU, a tile of rows of W at a time."""
    if 0 < len(x) <= max_fused_rows(x):
        return matmul_fused(x.contiguous(), weight, y, bias)
    rows, columns = weight.shape
    tile_rows = max(1, TILE_SIZE // columns)
    for start in range(0, rows, tile_rows):
        count = min(tile_rows, rows - start)
        tile = decode(weight.submatrix(start, 0, count, columns), SCRATCH.take(count, columns, x.dtype)).T
        out = y[:, start : start + count]
        if bias is None:
            torch.mm(x, tile, out=out)
        else:
            torch.addmm(bias[start : start + count], x, tile, out=out)
    return y


def matmul_fused(x: Tensor, weight: NF4Weight, y: Tensor, bias: Tensor | None) -> Tensor:
    """`matmul_tiled` for few rows (generation), without writing the dequantized weight to memory."""
    rows, columns = weight.shape
    check_tensor("nf4", "x", x, (*x.shape[:-1], columns), x.dtype, weight.packed.device)
    check_tensor("nf4", "y", y, (*x.shape[:-1], rows), x.dtype, x.device)
    if bias is not None:
        check_tensor("nf4", "bias", bias, (rows,), x.dtype, x.device)
        check_contiguous("nf4", "bias", bias)
    kernel = getattr(compiled(), f"matmul_{DTYPES[x.dtype]}")
    bias_pointer = None if bias is None else bias.data_ptr()
    args = *weight.native_args(), code_values(weight.kind, x.device).data_ptr(), bias_pointer
    sizes = rows, columns // BLOCK, weight.packed.stride(0), torch.get_num_threads()
    kernel(x.data_ptr(), *args, y.data_ptr(), x.numel() // columns, *sizes)
    return y


def matmul_backward_tiled(grad: Tensor, weight: NF4Weight, x: Tensor) -> Tensor:
    """Write grad W (N, in) to `x` for grad (N, out) on the CPU, a tile of columns of W at a time."""
    rows, columns = weight.shape
    tile_columns = max(1, TILE_SIZE // (rows * BLOCK)) * BLOCK
    for start in range(0, columns, tile_columns):
        count = min(tile_columns, columns - start)
        tile = decode(weight.submatrix(0, start, rows, count), SCRATCH.take(rows, count, grad.dtype))
        torch.mm(grad, tile, out=x[:, start : start + count])
    return x


def register_operator(name: str, schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorator that registers an operator, which torch.compile does not trace into.

    Gradients come from autograd functions: 13 us per call, and 39 us with `torch.library.custom_op` and
    `register_autograd`.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        torch.library.define(f"tunekit::{name}", schema)
        torch.library.impl(f"tunekit::{name}", ("cpu", *ACCELERATORS))(function)
        return getattr(torch.ops.tunekit, name).default

    return register


@register_operator(
    "nf4_matmul",
    "(Tensor x, Tensor packed, Tensor scales, Tensor? outer_scales, str kind, Tensor? bias, Tensor? sizes=None)"
    " -> Tensor",
)
def forward(  # noqa: PLR0913 (an operator takes no named tuples)
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    outer_scales: Tensor | None,
    kind: str,
    bias: Tensor | None,
    sizes: Tensor | None = None,
) -> Tensor:
    """x W^T + b, or x W[e]^T for rows sorted by expert if `sizes` (E,) is given, the number of rows of each expert."""
    gpu = triton_kernels("nf4_matmul") if sizes is None and x.numel() and uses_triton(x) else None
    if gpu is not None and x.numel() <= gpu.max_rows(x.dtype, x.device) * x.shape[-1]:
        weight, tables = (packed, scales, outer_scales), (code_values(kind, x.device), dynamic_map(x.device))
        return gpu.matmul_fused(x.flatten(0, -2), weight, kind, *tables, bias).view(*x.shape[:-1], -1)
    if x.device.type != "cpu":
        return grouped_mm.matmul(x, dequantize(packed, scales, outer_scales, kind, x.dtype), sizes, bias)
    weight, y = NF4Weight(packed, scales, outer_scales, kind), x.new_empty(*x.shape[:-1], packed.shape[-2])
    if sizes is None:
        matmul_tiled(x.flatten(0, -2), weight, y.flatten(0, -2), bias)
        return y
    return for_each_expert(matmul_tiled, x, weight, sizes, y)


@register_operator(
    "nf4_matmul_backward",
    "(Tensor grad, Tensor packed, Tensor scales, Tensor? outer_scales, str kind, Tensor? sizes=None) -> Tensor",
)
def matmul_backward(
    grad: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, kind: str, sizes: Tensor | None = None
) -> Tensor:
    """grad W: (..., out) to (..., in); grad W[e] if `sizes` is given, as in `forward`."""
    if grad.device.type != "cpu":
        return grouped_mm.matmul(grad, dequantize(packed, scales, outer_scales, kind, grad.dtype).mT, sizes)
    weight, x = NF4Weight(packed, scales, outer_scales, kind), grad.new_empty(*grad.shape[:-1], 2 * packed.shape[-1])
    if sizes is None:
        matmul_backward_tiled(grad.flatten(0, -2), weight, x.flatten(0, -2))
        return x
    return for_each_expert(matmul_backward_tiled, grad, weight, sizes, x)


def for_each_expert(
    matmul: Callable[..., Tensor], x: Tensor, weights: NF4Weight, sizes: Tensor, output: Tensor
) -> Tensor:
    """Call `matmul` for each expert that has rows. At most one tile of one expert is dequantized at a time."""
    start, blocks = 0, weights.packed.shape[1] * weights.packed.shape[2] * 2 // BLOCK
    counts = sizes.tolist()
    if len(counts) != len(weights.packed) or sum(counts) != len(x) or min(counts, default=0) < 0:
        raise ValueError(f"nf4: sizes is {counts}, expected {len(weights.packed)} counts of rows, {len(x)} in all")
    for expert, count in enumerate(counts):
        if count:
            weight = NF4Weight(weights.packed[expert], weights.scales[expert], *weights[2:4], expert * blocks)
            matmul(x[start : start + count], weight, output[start : start + count])
            start += count
    return output


@torch.library.register_fake("tunekit::nf4_matmul")
def _(x: Tensor, packed: Tensor, *others: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[-2])


@torch.library.register_fake("tunekit::nf4_matmul_backward")
def _(grad: Tensor, packed: Tensor, *others: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], 2 * packed.shape[-1])


class NF4Matmul(torch.autograd.Function):
    """`forward` with gradients. Saves neither the dequantized weight nor `x` for the backward pass.

    Arguments are named instead of `*args`: if no input needs a gradient, torch.compile compares the number of arguments
    with the number of parameters without `ctx`, and counts `*args` as one.
    """

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        outer_scales: Tensor | None,
        kind: str,
        bias: Tensor | None,
        sizes: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, outer_scales, sizes)
        ctx.kind = kind
        return forward(x, packed, scales, outer_scales, kind, bias, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *weight, sizes = ctx.saved_tensors
        grad_x = matmul_backward(grads[0], *weight, ctx.kind, sizes) if ctx.needs_input_grad[0] else None
        grad_bias = grads[0].flatten(0, -2).sum(0) if ctx.needs_input_grad[5] else None
        return grad_x, None, None, None, None, grad_bias, None


def matmul(
    x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, kind: str, bias: Tensor | None = None
) -> Tensor:
    """x W^T + b: (..., in) to (..., out)."""
    if torch.is_grad_enabled():
        return NF4Matmul.apply(x, packed, scales, outer_scales, kind, bias, None)
    if torch.compiler.is_compiling() or not 0 < x.numel() <= max_fused_rows(x) * x.shape[-1]:
        return forward(x, packed, scales, outer_scales, kind, bias)
    # Generation calls this for each layer and token, where the overhead of an operator is as large as the computation.
    return matmul_fused(
        x.contiguous(), NF4Weight(packed, scales, outer_scales, kind), x.new_empty(*x.shape[:-1], len(packed)), bias
    )


def grouped_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, sizes: Tensor, kind: str
) -> Tensor:
    """x W[e]^T (N, out) for rows x (N, in) sorted by expert e; expert e has `sizes[e]` rows."""
    run = NF4Matmul.apply if torch.is_grad_enabled() else forward
    return run(x, packed, scales, outer_scales, kind, None, sizes)
