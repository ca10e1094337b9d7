"""Weights in eight bits: floats of four exponent and three mantissa bits (e4m3), in blocks of 64 numbers with a scale.

A weight (..., in) becomes bytes (..., in) and fp32 scales (..., in / 64), kept as bytes too: whatever casts a model's
numbers leaves them alone. The functions are those of nf4, so that a layer may have the one or the other.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import experts
from tunekit.kernels.nf4 import BLOCK, SMALLEST

CODES, LARGEST = torch.float8_e4m3fn, 448.0
TILE = 2**22  # numbers that are in fp32 at once


def quantize(weight: Tensor, kind: str = "float8") -> tuple[Tensor, Tensor]:
    """Bytes (N,) and fp32 scales (N / 64,) of a weight; the largest number of each block comes out as it was."""
    blocks = weight.detach().float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(1) / LARGEST
    codes = (blocks / scales.clamp_min(SMALLEST)[:, None]).clamp_(-LARGEST, LARGEST).to(CODES)
    return codes.view(torch.uint8).flatten(), scales


def unpacked_scales(scales: Tensor, outer: Tensor | None) -> Tensor:
    """Scales as fp32 numbers."""
    assert outer is None, "scales of floats are not packed again"
    return scales.view(torch.float32)


def dequantize(
    packed: Tensor, scales: Tensor, outer: Tensor | None = None, kind: str = "", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight (..., in) as numbers: products of code and scale in fp32, rounded once."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    rows, columns = packed.numel() // packed.shape[-1], packed.shape[-1]
    parts = (packed.reshape(rows, columns), unpacked_scales(scales, outer).reshape(rows, -1), out.view(rows, columns))
    some = max(1, TILE // columns)
    for codes, factors, place in zip(*(part.split(some) for part in parts), strict=True):
        numbers = codes.view(CODES).float().view(-1, columns // BLOCK, BLOCK)
        place.copy_((numbers * factors[..., None]).view(-1, columns))
    return out


class Product(torch.autograd.Function):
    """Nothing dense is kept for the backward pass, nor is `x`: the weight is decoded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, sizes: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed, scales, sizes)
        return times(x, dequantize(packed, scales, dtype=x.dtype), sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, scales, sizes = ctx.saved_tensors
        back = times(grads[0], dequantize(packed, scales, dtype=grads[0].dtype).mT, sizes)
        return back, None, None, None


def times(x: Tensor, weight: Tensor, sizes: Tensor | None) -> Tensor:
    """x W^T; of rows sorted by expert, each with its own W of a stack."""
    return F.linear(x, weight) if sizes is None else experts.grouped(x, weight, sizes)


def product(
    x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str, bias: Tensor | None = None
) -> Tensor:
    """x W^T + b: (..., in) to (..., out)."""
    y = Product.apply(x, packed, scales, None)
    return y if bias is None else y + bias


def product_back(grad: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, kind: str) -> Tensor:
    """grad W: (..., out) to (..., in)."""
    return grad @ dequantize(packed, scales, dtype=grad.dtype)


def grouped(x: Tensor, packed: Tensor, scales: Tensor, outer: Tensor | None, sizes: Tensor, kind: str) -> Tensor:
    """x W[e]^T of rows (N, in) sorted by expert, of which each has `sizes` (E,): (N, out)."""
    return Product.apply(x, packed, scales, sizes)
