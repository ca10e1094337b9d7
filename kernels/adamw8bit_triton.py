"""Triton kernel of the AdamW step with 8-bit moments. Loaded by adamw8bit.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from tunekit.kernels.adamw8bit import AdamWHyperparams, Moments

# As in adamw8bit.py: code offsets are MIN_EXPONENT << mantissa bits.
BLOCK_SIZE, FIRST_SHIFT, SECOND_SHIFT, DITHER_STEP = (tl.constexpr(n) for n in (256, 20, 19, 324019))
FIRST_CODE_OFFSET, SECOND_CODE_OFFSET = tl.constexpr(112 << 3), tl.constexpr(112 << 4)
HALF_FIRST_STEP, DITHER_MASK = tl.constexpr(1 << 19), tl.constexpr((1 << 19) - 1)
BLOCKS = 8  # blocks per program


@triton.jit
def maximum(a, b):
    return tl.where(a > b, a, b)


# Kernels are not specialized on the step and the sizes of a weight, except the row length, which affects load widths.
@triton.jit(do_not_specialize=["blocks_per_row", "num_blocks", "step"])
def step_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    weight, grad, first_codes, second_codes, scales, row_length, blocks_per_row, num_blocks, step,
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, inverse_sqrt_bias_correction2, eps,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)  # int32, enough for 2^39 values: int64 division is slow
    index = tl.arange(0, BLOCK_SIZE)
    column = ((block % blocks_per_row).to(tl.int64) * BLOCK_SIZE)[:, None] + index[None]
    offsets = ((block // blocks_per_row).to(tl.int64) * row_length)[:, None] + column
    block_mask = block < num_blocks
    mask = (column < row_length) & block_mask[:, None]
    w = tl.load(weight + offsets, mask, 0.0).to(tl.float32)
    g = tl.load(grad + offsets, mask, 0.0).to(tl.float32)
    first = tl.load(first_codes + offsets, mask, 0).to(tl.int32)
    second = tl.load(second_codes + offsets, mask, 0).to(tl.int32)
    scale = tl.load(scales + block, block_mask, 0.0)[:, None]
    magnitude = first & 127
    bits = tl.where(magnitude > 0, (magnitude + FIRST_CODE_OFFSET) << FIRST_SHIFT, 0) | ((first & 128) << 24)
    m = bits.to(tl.float32, bitcast=True) * scale * beta1 + g * one_minus_beta1
    bits = tl.where(second > 0, (second + SECOND_CODE_OFFSET) << SECOND_SHIFT, 0)
    sqrt_v = bits.to(tl.float32, bitcast=True) * tl.load(scales + num_blocks + block, block_mask, 0.0)[:, None]
    sqrt_v = tl.sqrt_rn(sqrt_v * sqrt_v * beta2 + g * g * one_minus_beta2)
    w = w * decay - tl.div_rn(m, sqrt_v * inverse_sqrt_bias_correction2 + eps) * step_size
    tl.store(weight + offsets, w.to(weight.dtype.element_ty), mask)

    scale = tl.div_rn(tl.reduce(tl.abs(m), 1, maximum), tl.full((BLOCKS,), 1.875, tl.float32))
    tl.store(scales + block, scale, block_mask)
    ratio = tl.div_rn(m, tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], (BLOCKS, BLOCK_SIZE)))
    bits = tl.where(scale[:, None] > 0, ratio, 0.0).to(tl.int32, bitcast=True)
    magnitude = (((bits & 0x7FFFFFFF) + HALF_FIRST_STEP) >> FIRST_SHIFT) - FIRST_CODE_OFFSET
    code = tl.minimum(tl.maximum(magnitude, 0), 127) | ((bits >> 24) & 128)
    tl.store(first_codes + offsets, code.to(tl.uint8), mask)

    scale = tl.div_rn(tl.reduce(sqrt_v, 1, maximum), tl.full((BLOCKS,), 1.9375, tl.float32))
    tl.store(scales + num_blocks + block, scale, block_mask)
    ratio = tl.div_rn(sqrt_v, tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], (BLOCKS, BLOCK_SIZE)))
    bits = tl.where(scale[:, None] > 0, ratio, 0.0).to(tl.int32, bitcast=True)
    dither = (((step + index.to(tl.int64)) * DITHER_STEP) & DITHER_MASK).to(tl.int32)
    code = ((bits + dither[None]) >> SECOND_SHIFT) - SECOND_CODE_OFFSET
    tl.store(second_codes + offsets, tl.where(bits > 0, tl.minimum(tl.maximum(code, 1), 255), 0).to(tl.uint8), mask)


def step(weight: Tensor, grad: Tensor, moments: "Moments", hyperparams: "AdamWHyperparams") -> None:
    """Update `weight` (n,) and its moments in place."""
    num_blocks = moments.scales.shape[1]
    # Without fused multiply-add, whose single rounding would differ from the reference.
    step_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
        weight,
        grad,
        moments.first,
        moments.second,
        moments.scales,
        moments.length,
        triton.cdiv(moments.length, BLOCK_SIZE.value),
        num_blocks,
        hyperparams.step,
        *hyperparams.factors,
        BLOCKS=BLOCKS,
        enable_fp_fusion=False,
    )
