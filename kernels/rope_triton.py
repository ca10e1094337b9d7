"""Rotation of queries or keys on a GPU: a program for some heads of a token. rope.py loads this where there is one."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# There is no Triton on macOS and Windows, nor a GPU that would load this file.

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048  # of one program: twice as many took 128 registers of each thread, and spilled with Triton 3.6


@triton.jit
def rotate_kernel(  # noqa: PLR0913 (a launch has no other way to pass them)
    x, y, cos, sin, heads, dim, half, start, token_stride, head_stride, sign,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAIRED_IN: tl.constexpr, PAIRED_OUT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # int64: heads of long rows may be far apart
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    to = tl.arange(0, SIZE)[None, :]  # a channel of what goes out
    real = (head < heads) & (to < dim)
    place = to - start  # among those that turn
    turns = (place >= 0) & (place < 2 * half)
    pair = place // 2 if PAIRED_OUT else tl.where(place < half, place, place - half)
    second = place % 2 == 1 if PAIRED_OUT else place >= half
    own = 2 * pair + second.to(tl.int32) if PAIRED_IN else pair + half * second.to(tl.int32)
    other = 2 * pair + 1 - second.to(tl.int32) if PAIRED_IN else pair + half - half * second.to(tl.int32)
    row = x + token * token_stride + head * head_stride
    # Equal if neither order changes: then the compiler sees that it may load several numbers at once.
    source = to if PAIRED_IN == PAIRED_OUT else tl.where(turns, own + start, to)
    kept = tl.load(row + source, real, 0)
    a = kept.to(tl.float32)
    b = tl.load(row + other + start, real & turns, 0).to(tl.float32)
    c = tl.load(cos + token * half + pair, turns, 1)
    s = tl.load(sin + token * half + pair, turns, 0) * tl.where(second, sign, -sign)
    found = tl.where(turns, (a * c + b * s).to(y.dtype.element_ty), kept)
    tl.store(y + (token * heads + head) * dim + to, found, real)


def rotate(  # noqa: PLR0913
    x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, start: int, sign: float, paired_in: bool, paired_out: bool
) -> None:
    """Fill `y` from (T, H, D) and tables (T, pairs); pairs of channels from `start` on turn."""
    tokens, heads, dim = x.shape
    size = triton.next_power_of_2(dim)
    each = min(triton.next_power_of_2(max(heads, 1)), max(1, NUMBERS // size))
    if x.numel():
        rotate_kernel[(tokens, triton.cdiv(heads, each))](
            x, y, cos, sin, heads, dim, cos.shape[1], start, *x.stride()[:2], sign,
            HEADS=each, SIZE=size, PAIRED_IN=paired_in, PAIRED_OUT=paired_out, enable_fp_fusion=False,
        )  # fmt: skip
