"""Triton kernel that dequantizes float8 weights in one launch. Loaded by float8.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunekit.kernels.argument_checks import check_tensor

BLOCK_SIZE = tl.constexpr(64)  # values per scale
BLOCKS = 32  # blocks per program: 16 bytes per thread, one load instruction


@triton.jit
def dequantize_kernel(codes, scales, out, num_blocks, BLOCKS: tl.constexpr):
    """Dequantize `num_blocks` blocks: code * scale in fp32, rounded to the dtype of `out`.

    Codes are decoded with integer operations: Triton converts float8_e4m3fn only on sm_89 and later. A code is
    s eeee mmm; shifted by 20 bits, its exponent and mantissa are those of an fp32 value that is 2^120 times smaller.
    Offsets are int64: a stack of experts may have more than 2^31 values.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    mask = block < num_blocks
    code = tl.load(codes + offsets, mask[:, None], 0).to(tl.int32)
    magnitude = code & 127
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # subnormal: multiples of 2^-9
    x = tl.where(magnitude == 127, float("nan"), x)
    x = tl.where(code > 127, -x, x) * tl.load(scales + block, mask, 0)[:, None]
    tl.store(out + offsets, x.to(out.dtype.element_ty), mask[:, None])


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Products of codes (..., in), as bytes, and fp32 scales (..., in / 64), rounded once to `dtype`."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    num_blocks = scales.numel()
    num_values = num_blocks * BLOCK_SIZE.value
    check_tensor("float8", "codes", codes.reshape(-1), (num_values,), torch.uint8, scales.device)
    if num_blocks:
        grid = (triton.cdiv(num_blocks, BLOCKS),)
        dequantize_kernel[grid](codes.contiguous(), scales.contiguous(), out, num_blocks, BLOCKS=BLOCKS)
    return out
