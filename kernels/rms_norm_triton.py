"""The norm of rows on a GPU: a row to a program, forward and backward. norm.py loads this where there is one."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# There is no Triton on macOS and Windows, nor a GPU that would load this file.

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def forward_kernel(  # noqa: PLR0913 (a launch has no other way to pass them)
    x, weight, y, rstd, stride, dim, eps, offset, SIZE: tl.constexpr, WEIGHT: tl.constexpr, LATE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    real = at < dim
    wide = tl.load(x + row * stride + at, real, 0).to(tl.float32)
    by = 1 / tl.sqrt(tl.reduce(wide * wide, 0, plus) / dim + eps)
    tl.store(rstd + row, by)
    kind = y.dtype.element_ty
    found = wide * by
    if WEIGHT:
        factor = tl.load(weight + at, real, 0)
        if LATE:
            found = found * (factor.to(tl.float32) + offset)
        else:
            found = found.to(kind).to(tl.float32) * factor.to(kind).to(tl.float32)
    tl.store(y + row * dim + at, found.to(kind), real)


# Row counts differ from batch to batch: none may be part of what is compiled.
@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def backward_kernel(  # noqa: PLR0913
    grad, x, weight, rstd, to_x, parts, grad_stride, x_stride, rows, rows_per_program, dim, offset,
    SIZE: tl.constexpr, WEIGHT: tl.constexpr, LATE: tl.constexpr, LEARNT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    real = at < dim
    factor = tl.full((SIZE,), 1.0, tl.float32)
    if WEIGHT:
        if LATE:
            factor = tl.load(weight + at, real, 0).to(tl.float32) + offset
        else:
            factor = tl.load(weight + at, real, 0).to(to_x.dtype.element_ty).to(tl.float32)
    sums = tl.full((SIZE,), 0.0, tl.float32)
    first_row = block * rows_per_program
    for row in range(first_row, tl.minimum(first_row + rows_per_program, rows)):
        by = tl.load(rstd + row)
        unit = tl.load(x + row * x_stride + at, real, 0).to(tl.float32) * by
        came = tl.load(grad + row * grad_stride + at, real, 0).to(tl.float32)
        sums += came * unit
        scaled = came * factor
        found = (scaled - unit * (tl.reduce(scaled * unit, 0, plus) / dim)) * by
        tl.store(to_x + row * dim + at, found.to(to_x.dtype.element_ty), real)
    if LEARNT:
        tl.store(parts + block * dim + at, sums, real)


def warps(size: int) -> int:
    return min(max(size // 512, 1), 16)


def forward(x: Tensor, weight: Tensor | None, y: Tensor, rstd: Tensor, eps: float, offset: float, late: bool) -> None:
    """Fill `y` and `rstd` from rows (N, dim)."""
    rows, dim = x.shape
    size = triton.next_power_of_2(dim)
    if rows:
        forward_kernel[(rows,)](
            x, x if weight is None else weight, y, rstd, x.stride(0), dim, eps, offset,
            SIZE=size, WEIGHT=weight is not None, LATE=late, num_warps=warps(size), enable_fp_fusion=False,
        )  # fmt: skip


def backward(  # noqa: PLR0913
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, to_x: Tensor, parts: Tensor, offset: float, late: bool
) -> None:
    """Fill `to_x`, and the sums of some rows' gradients to the weight (blocks, dim) if there is room for any."""
    rows, dim = x.shape
    # Without sums to make, a program for every four rows keeps the device busy; with them, as norm.py has counted.
    each = -(-rows // len(parts)) if len(parts) else 4
    size = triton.next_power_of_2(dim)
    if rows:
        backward_kernel[(triton.cdiv(rows, each),)](
            grad, x, x if weight is None else weight, rstd, to_x, parts, grad.stride(0), x.stride(0), rows, each, dim,
            offset, SIZE=size, WEIGHT=weight is not None, LATE=late, LEARNT=len(parts) > 0, num_warps=warps(size),
        )  # fmt: skip
