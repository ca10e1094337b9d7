"""Triton kernel of the AdamW step with 8-bit moments. Loaded by adamw8bit.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from tunekit.kernels.adamw8bit import AdamWHyperparams, Moments

# As in adamw8bit.py: MIN_EXPONENT shifted by the mantissa bits of each code, and half a step of the first code.
BLOCK, FIRST, SECOND, TURN = (tl.constexpr(n) for n in (256, 20, 19, 324019))
LOW_FIRST, LOW_SECOND, HALF, MASK = (tl.constexpr(n) for n in (112 << 3, 112 << 4, 1 << 19, (1 << 19) - 1))
BLOCKS = 8  # blocks per program


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


# Kernels are not specialized on the step and the sizes of a weight, except the row length, which affects load widths.
@triton.jit(do_not_specialize=["of_row", "blocks", "number"])
def step_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    weight, grad, first, second, scales, row, of_row, blocks, number,
    keep, new, keep_square, new_square, shrink, size, correct, eps, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)  # int32, enough for 2^39 values: int64 division is slow
    inside = tl.arange(0, BLOCK)
    column = ((block % of_row).to(tl.int64) * BLOCK)[:, None] + inside[None]
    at = ((block // of_row).to(tl.int64) * row)[:, None] + column
    is_block = block < blocks
    mask = (column < row) & is_block[:, None]
    w = tl.load(weight + at, mask, 0.0).to(tl.float32)
    g = tl.load(grad + at, mask, 0.0).to(tl.float32)
    a = tl.load(first + at, mask, 0).to(tl.int32)
    b = tl.load(second + at, mask, 0).to(tl.int32)
    scale = tl.load(scales + block, is_block, 0.0)[:, None]
    low = a & 127
    low = tl.where(low > 0, (low + LOW_FIRST) << FIRST, 0) | ((a & 128) << 24)
    m = low.to(tl.float32, bitcast=True) * scale * keep + g * new
    high = tl.where(b > 0, (b + LOW_SECOND) << SECOND, 0)
    root = high.to(tl.float32, bitcast=True) * tl.load(scales + blocks + block, is_block, 0.0)[:, None]
    root = tl.sqrt_rn(root * root * keep_square + g * g * new_square)
    w = w * shrink - tl.div_rn(m, root * correct + eps) * size
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask)

    scale = tl.div_rn(tl.reduce(tl.abs(m), 1, larger), tl.full((BLOCKS,), 1.875, tl.float32))
    tl.store(scales + block, scale, is_block)
    share = tl.div_rn(m, tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], (BLOCKS, BLOCK)))
    x = tl.where(scale[:, None] > 0, share, 0.0).to(tl.int32, bitcast=True)
    low = (((x & 0x7FFFFFFF) + HALF) >> FIRST) - LOW_FIRST
    code = tl.minimum(tl.maximum(low, 0), 127) | ((x >> 24) & 128)
    tl.store(first + at, code.to(tl.uint8), mask)

    scale = tl.div_rn(tl.reduce(root, 1, larger), tl.full((BLOCKS,), 1.9375, tl.float32))
    tl.store(scales + blocks + block, scale, is_block)
    share = tl.div_rn(root, tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], (BLOCKS, BLOCK)))
    x = tl.where(scale[:, None] > 0, share, 0.0).to(tl.int32, bitcast=True)
    up = (((number + inside.to(tl.int64)) * TURN) & MASK).to(tl.int32)
    code = ((x + up[None]) >> SECOND) - LOW_SECOND
    tl.store(second + at, tl.where(x > 0, tl.minimum(tl.maximum(code, 1), 255), 0).to(tl.uint8), mask)


def step(weight: Tensor, grad: Tensor, moments: "Moments", hyperparams: "AdamWHyperparams") -> None:
    """Update `weight` (n,) and its moments in place."""
    blocks = moments.scales.shape[1]
    # Without fused multiply-add, whose single rounding would differ from the reference.
    step_kernel[(triton.cdiv(blocks, BLOCKS),)](
        weight,
        grad,
        moments.first,
        moments.second,
        moments.scales,
        moments.length,
        triton.cdiv(moments.length, 256),
        blocks,
        hyperparams.step,
        *hyperparams.factors,
        BLOCKS=BLOCKS,
        enable_fp_fusion=False,
    )
