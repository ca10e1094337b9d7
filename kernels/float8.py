"""Weights in eight bits: floats of four exponent and three mantissa bits (e4m3), in blocks of 64 numbers with a scale.

A weight (..., in) becomes bytes (..., in) and fp32 scales (..., in / 64), kept as bytes too: whatever casts a model's
numbers leaves them alone. The functions are those of nf4, so that a layer may have the one or the other.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import grouped_mm
from tunekit.kernels.nf4 import BLOCK, QUANTIZE_CHUNK, MIN_SCALE
from tunekit.kernels.triton_support import uses_triton

CODE_DTYPE, MAX_VALUE = torch.float8_e4m3fn, 448.0
TILE_SIZE = {"cpu": 2**22, "cuda": 2**24}  # numbers that are in fp32 at once; launches cost more than memory on a GPU


def quantize(weight: Tensor, kind: str = "float8") -> tuple[Tensor, Tensor]:
    """Bytes (N,) and fp32 scales (N / 64,) of a weight; the largest number of each block comes out as it was."""
    flat = weight.detach().reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(len(flat) // BLOCK, device=flat.device)
    for start in range(0, len(flat), QUANTIZE_CHUNK):  # a copy of all numbers in fp32 could exceed the memory
        blocks = flat[start : start + QUANTIZE_CHUNK].float().view(-1, BLOCK)
        absmax = blocks.abs().amax(1) / MAX_VALUE
        rounded = (blocks / absmax.clamp_min(MIN_SCALE)[:, None]).clamp_(-MAX_VALUE, MAX_VALUE).to(CODE_DTYPE)
        codes[start : start + QUANTIZE_CHUNK] = rounded.view(torch.uint8).flatten()
        scales[start // BLOCK : start // BLOCK + len(absmax)] = absmax
    return codes, scales


def unpacked_scales(scales: Tensor, outer: Tensor | None) -> Tensor:
    """Scales as fp32 numbers."""
    assert outer is None, "scales of floats are not packed again"
    return scales.view(torch.float32)


def dequantize(
    packed: Tensor, scales: Tensor, outer: Tensor | None = None, kind: str = "", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight (..., in) as numbers: products of code and scale in fp32, rounded once.

    One launch on CUDA. Compiled functions take the operations of torch, which the compiler fuses.
    """
    if not torch.compiler.is_compiling() and uses_triton(packed):
        return gpu().dequantize(packed, unpacked_scales(scales, outer), dtype)
    return dequantize_reference(packed, unpacked_scales(scales, outer), dtype)


def dequantize_reference(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` of fp32 scales in plain torch, a tile at a time."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    rows, columns = packed.numel() // packed.shape[-1], packed.shape[-1]
    parts = (packed.reshape(rows, columns), scales.reshape(rows, -1), out.view(rows, columns))
    some = max(1, TILE_SIZE.get(packed.device.type, TILE_SIZE["cpu"]) // columns)
    for codes, factors, place in zip(*(part.split(some) for part in parts), strict=True):
        numbers = codes.view(CODE_DTYPE).float().view(-1, columns // BLOCK, BLOCK)
        place.copy_((numbers * factors[..., None]).view(-1, columns))
    return out


@cache
def gpu() -> ModuleType:
    """The Triton kernels, loaded only where there is a GPU."""
    return importlib.import_module("tunekit.kernels.float8_triton")


class Float8Matmul(torch.autograd.Function):
    """Nothing dense is kept for the backward pass, nor is `x`: the weight is decoded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, sizes: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed, scales, sizes)
        return matmul_dense(x, dequantize(packed, scales, dtype=x.dtype), sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, scales, sizes = ctx.saved_tensors
        back = matmul_dense(grads[0], dequantize(packed, scales, dtype=grads[0].dtype).mT, sizes)
        return back, None, None, None


def matmul_dense(x: Tensor, weight: Tensor, sizes: Tensor | None) -> Tensor:
    """x W^T; of rows sorted by expert, each with its own W of a stack."""
    return F.linear(x, weight) if sizes is None else grouped_mm.grouped_mm(x, weight, sizes)


def matmul(
    x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None = None
) -> Tensor:
    """x W^T + b: (..., in) to (..., out)."""
    y = Float8Matmul.apply(x, packed, scales, None)
    return y if bias is None else y + bias


def matmul_backward(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str) -> Tensor:
    """grad W: (..., out) to (..., in)."""
    return grad @ dequantize(packed, scales, dtype=grad.dtype)


def grouped_matmul(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    """x W[e]^T of rows (N, in) sorted by expert, of which each has `sizes` (E,): (N, out)."""
    return Float8Matmul.apply(x, packed, scales, sizes)
