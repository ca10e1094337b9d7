"""Kernels for the check of overflows itself: integers that overflow on purpose, and the same repaired."""

# pyright: reportIndexIssue=false, reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def wrong_mask(x, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(x + at, 0.0, at < 2 * count)


@triton.jit
def wrong_address(x, stride, SIZE: tl.constexpr):
    tl.store(x + tl.program_id(0) * stride + tl.arange(0, SIZE), 0.0)


@triton.jit
def wrong_row(x, ends, stride, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + tl.sum(tl.load(ends + at), 0) * stride + at, 0.0)


@triton.jit
def right(x, count, stride, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    tl.store(x + row * stride + at, 0.0, row * SIZE + at < count.to(tl.int64) * 2)
