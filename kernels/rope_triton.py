"""Triton kernel of RoPE. Loaded by rope.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048  # elements per program: 4,096 took 128 registers per thread, and spilled with Triton 3.6


@triton.jit
def rotate_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    x, y, cos, sin, heads, dim, half, start, token_stride, head_stride, sign,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAIRED_IN: tl.constexpr, PAIRED_OUT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # int64: heads of long rows may be far apart
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    to = tl.arange(0, SIZE)[None, :]  # output channel
    real = (head < heads) & (to < dim)
    offset = to - start  # index among the rotated channels
    turns = (offset >= 0) & (offset < 2 * half)
    pair = offset // 2 if PAIRED_OUT else tl.where(offset < half, offset, offset - half)
    second = offset % 2 == 1 if PAIRED_OUT else offset >= half
    # Input channels: the one of this output, and the other one of the pair
    same = 2 * pair + second.to(tl.int32) if PAIRED_IN else pair + half * second.to(tl.int32)
    partner = 2 * pair + 1 - second.to(tl.int32) if PAIRED_IN else pair + half - half * second.to(tl.int32)
    row = x + token * token_stride + head * head_stride
    # If the channel order does not change, the compiler can vectorize this load.
    source = to if PAIRED_IN == PAIRED_OUT else tl.where(turns, same + start, to)
    unrotated = tl.load(row + source, real, 0)
    a = unrotated.to(tl.float32)
    b = tl.load(row + partner + start, real & turns, 0).to(tl.float32)
    c = tl.load(cos + token * half + pair, turns, 1)
    s = tl.load(sin + token * half + pair, turns, 0) * tl.where(second, sign, -sign)
    result = tl.where(turns, (a * c + b * s).to(y.dtype.element_ty), unrotated)
    tl.store(y + (token * heads + head) * dim + to, result, real)


def rotate(  # noqa: PLR0913
    x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, start: int, sign: float, paired_in: bool, paired_out: bool
) -> None:
    """Write rotated heads (T, H, D) to `y`. Tables are (T, pairs); rotated channels begin at `start`."""
    tokens, heads, dim = x.shape
    size = triton.next_power_of_2(dim)
    heads_per_program = min(triton.next_power_of_2(max(heads, 1)), max(1, NUMBERS // size))
    if x.numel():
        rotate_kernel[(tokens, triton.cdiv(heads, heads_per_program))](
            x, y, cos, sin, heads, dim, cos.shape[1], start, *x.stride()[:2], sign,
            HEADS=heads_per_program, SIZE=size, PAIRED_IN=paired_in, PAIRED_OUT=paired_out, enable_fp_fusion=False,
        )  # fmt: skip
