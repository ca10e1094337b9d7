"""Triton kernels of RMSNorm, forward and backward. Loaded by rms_norm.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def forward_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    x, weight, y, rstd, stride, dim, eps, offset, SIZE: tl.constexpr, WEIGHT: tl.constexpr, LATE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    real = at < dim
    wide = tl.load(x + row * stride + at, real, 0).to(tl.float32)
    inverse_rms = 1 / tl.sqrt(tl.reduce(wide * wide, 0, plus) / dim + eps)
    tl.store(rstd + row, inverse_rms)
    kind = y.dtype.element_ty
    result = wide * inverse_rms
    if WEIGHT:
        factor = tl.load(weight + at, real, 0)
        if LATE:
            result = result * (factor.to(tl.float32) + offset)
        else:
            result = result.to(kind).to(tl.float32) * factor.to(kind).to(tl.float32)
    tl.store(y + row * dim + at, result.to(kind), real)


# Row counts differ from batch to batch, so kernels are not specialized on them.
@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def backward_kernel(  # noqa: PLR0913
    grad, x, weight, rstd, to_x, parts, grad_stride, x_stride, rows, rows_per_program, dim, offset,
    SIZE: tl.constexpr, WEIGHT: tl.constexpr, LATE: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
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
        inverse_rms = tl.load(rstd + row)
        unit = tl.load(x + row * x_stride + at, real, 0).to(tl.float32) * inverse_rms
        grad_y = tl.load(grad + row * grad_stride + at, real, 0).to(tl.float32)
        sums += grad_y * unit
        scaled = grad_y * factor
        grad_x = (scaled - unit * (tl.reduce(scaled * unit, 0, plus) / dim)) * inverse_rms
        tl.store(to_x + row * dim + at, grad_x.to(to_x.dtype.element_ty), real)
    if WEIGHT_GRAD:
        tl.store(parts + block * dim + at, sums, real)


def warps(size: int) -> int:
    return min(max(size // 512, 1), 16)


def forward(x: Tensor, weight: Tensor | None, y: Tensor, rstd: Tensor, eps: float, offset: float, late: bool) -> None:
    """Write the norm of rows (N, dim) to `y`, and 1 / rms to `rstd` (N,)."""
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
    """Write the gradient of `x` to `to_x`, and partial sums of the weight gradient to `parts` (blocks, dim), if any."""
    rows, dim = x.shape
    # Without partial sums, four rows per program use the device well; with them, as many as rms_norm.py allocated.
    rows_per_program = -(-rows // len(parts)) if len(parts) else 4
    size = triton.next_power_of_2(dim)
    if rows:
        backward_kernel[(triton.cdiv(rows, rows_per_program),)](
            grad, x, x if weight is None else weight, rstd, to_x, parts, grad.stride(0), x.stride(0), rows, rows_per_program, dim,
            offset, SIZE=size, WEIGHT=weight is not None, LATE=late, WEIGHT_GRAD=len(parts) > 0, num_warps=warps(size),
        )  # fmt: skip
