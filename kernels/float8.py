"""8-bit float weights (e4m3) with one scale per block of 64 values.

A weight (..., in) becomes codes (..., in) and fp32 scales (..., in / 64). Both are stored as uint8, so that casting a
model does not change them. The functions have the signatures of nf4.py, because quantized layers use either module.
"""

from typing import Any

import torch
from torch import Tensor

from tunekit.kernels import fake_mode, grouped_mm
from tunekit.kernels.nf4 import BLOCK, MIN_SCALE, QUANTIZE_CHUNK
from tunekit.kernels.triton_support import triton_kernels, uses_triton

CODE_DTYPE, MAX_VALUE = torch.float8_e4m3fn, 448.0
TILE_SIZE = {"cpu": 2**22, "cuda": 2**24}  # values converted to fp32 at a time; larger on GPUs to save launches


def quantize(weight: Tensor, kind: str = "float8") -> tuple[Tensor, Tensor]:
    """Quantize a weight of N values to codes (N,) and fp32 scales (N / 64,). The maximum of each block is exact."""
    flat = weight.detach().reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(len(flat) // BLOCK, device=flat.device)
    for start in range(0, len(flat), QUANTIZE_CHUNK):  # an fp32 copy of the full weight may not fit into memory
        blocks = flat[start : start + QUANTIZE_CHUNK].float().view(-1, BLOCK)
        absmax = blocks.abs().amax(1) / MAX_VALUE
        rounded = (blocks / absmax.clamp_min(MIN_SCALE)[:, None]).clamp_(-MAX_VALUE, MAX_VALUE).to(CODE_DTYPE)
        codes[start : start + QUANTIZE_CHUNK] = rounded.view(torch.uint8).flatten()
        scales[start // BLOCK : start // BLOCK + len(absmax)] = absmax
    return codes, scales


def unpack_scales(scales: Tensor, outer_scales: Tensor | None) -> Tensor:
    """fp32 scales from their stored bytes."""
    assert outer_scales is None, "float8 does not support double quantization"
    return scales.view(torch.float32)


def dequantize(
    packed: Tensor,
    scales: Tensor,
    outer_scales: Tensor | None = None,
    kind: str = "",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantize to a weight (..., in): code * scale in fp32, rounded once to `dtype`.

    One kernel launch on CUDA. Compiled functions use torch operations, which the compiler fuses.
    """
    if not torch.compiler.is_compiling() and uses_triton(packed):
        return triton_kernels("float8").dequantize(packed, unpack_scales(scales, outer_scales), dtype)
    return dequantize_reference(packed, unpack_scales(scales, outer_scales), dtype)


def dequantize_reference(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Torch reference of `dequantize` with fp32 scales, a tile at a time."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    rows, columns = packed.numel() // packed.shape[-1], packed.shape[-1]
    tensors = (packed.reshape(rows, columns), scales.reshape(rows, -1), out.view(rows, columns))
    tile_rows = max(1, TILE_SIZE.get(fake_mode.device_type(packed), TILE_SIZE["cpu"]) // columns)
    for codes, tile_scales, tile in zip(*(tensor.split(tile_rows) for tensor in tensors), strict=True):
        values = codes.view(CODE_DTYPE).float().view(-1, columns // BLOCK, BLOCK)
        tile.copy_((values * tile_scales[..., None]).view(-1, columns))
    return out


class Float8Matmul(torch.autograd.Function):
    """x W^T with a float8 weight. The backward pass dequantizes the weight again; neither it nor `x` is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, sizes: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed, scales, sizes)
        return grouped_mm.matmul(x, dequantize(packed, scales, dtype=x.dtype), sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, scales, sizes = ctx.saved_tensors
        grad_input = grouped_mm.matmul(grads[0], dequantize(packed, scales, dtype=grads[0].dtype).mT, sizes)
        return grad_input, None, None, None


def matmul(
    x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, kind: str, bias: Tensor | None = None
) -> Tensor:
    """x W^T + b: (..., in) to (..., out)."""
    y = Float8Matmul.apply(x, packed, scales, None)
    return y if bias is None else y + bias


def matmul_backward(grad: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, kind: str) -> Tensor:
    """grad W: (..., out) to (..., in)."""
    return grad @ dequantize(packed, scales, dtype=grad.dtype)


def grouped_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, sizes: Tensor, kind: str
) -> Tensor:
    """x W[e]^T (N, out) for rows x (N, in) sorted by expert e; expert e has `sizes[e]` rows."""
    return Float8Matmul.apply(x, packed, scales, sizes)
