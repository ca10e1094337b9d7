"""Kernels that test the overflow check: integers that overflow on purpose, and one kernel without an overflow."""

# pyright: reportIndexIssue=false, reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def overflow_mask(x, count, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(x + offsets, 0.0, offsets < 2 * count)


@triton.jit
def overflow_address(x, stride, BLOCK_SIZE: tl.constexpr):
    tl.store(x + tl.program_id(0) * stride + tl.arange(0, BLOCK_SIZE), 0.0)


@triton.jit
def overflow_row(x, ends, stride, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    tl.store(x + tl.sum(tl.load(ends + offsets), 0) * stride + offsets, 0.0)


@triton.jit
def no_overflow(x, count, stride, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    tl.store(x + row * stride + offsets, 0.0, row * BLOCK_SIZE + offsets < count.to(tl.int64) * 2)
