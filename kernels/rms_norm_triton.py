"""Triton kernels of RMSNorm, forward and backward. Loaded by rms_norm.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def forward_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    x, weight, y, rstd, stride, dim, eps, offset,
    BLOCK_SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, SCALE_IN_FP32: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < dim
    x_row = tl.load(x + row * stride + columns, mask, 0).to(tl.float32)
    row_rstd = 1 / tl.sqrt(tl.reduce(x_row * x_row, 0, add) / dim + eps)
    tl.store(rstd + row, row_rstd)
    dtype = y.dtype.element_ty
    result = x_row * row_rstd
    if HAS_WEIGHT:
        w = tl.load(weight + columns, mask, 0)
        if SCALE_IN_FP32:
            result = result * (w.to(tl.float32) + offset)
        else:
            result = result.to(dtype).to(tl.float32) * w.to(dtype).to(tl.float32)
    tl.store(y + row * dim + columns, result.to(dtype), mask)


# Row counts differ from batch to batch, so kernels are not specialized on them.
@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def backward_kernel(  # noqa: PLR0913
    grad_output, x, weight, rstd, grad_x, partial_sums, grad_stride, x_stride, num_rows, rows_per_program, dim, offset,
    BLOCK_SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, SCALE_IN_FP32: tl.constexpr, NEEDS_WEIGHT_GRAD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < dim
    w = tl.full((BLOCK_SIZE,), 1.0, tl.float32)
    if HAS_WEIGHT:
        if SCALE_IN_FP32:
            w = tl.load(weight + columns, mask, 0).to(tl.float32) + offset
        else:
            w = tl.load(weight + columns, mask, 0).to(grad_x.dtype.element_ty).to(tl.float32)
    dw = tl.full((BLOCK_SIZE,), 0.0, tl.float32)
    first_row = block * rows_per_program
    for row in range(first_row, tl.minimum(first_row + rows_per_program, num_rows)):
        row_rstd = tl.load(rstd + row)
        x_hat = tl.load(x + row * x_stride + columns, mask, 0).to(tl.float32) * row_rstd
        dy = tl.load(grad_output + row * grad_stride + columns, mask, 0).to(tl.float32)
        dw += dy * x_hat
        wdy = dy * w
        dx = (wdy - x_hat * (tl.reduce(wdy * x_hat, 0, add) / dim)) * row_rstd
        tl.store(grad_x + row * dim + columns, dx.to(grad_x.dtype.element_ty), mask)
    if NEEDS_WEIGHT_GRAD:
        tl.store(partial_sums + block * dim + columns, dw, mask)


def choose_num_warps(block_size: int) -> int:
    return min(max(block_size // 512, 1), 16)


def forward(
    x: Tensor, weight: Tensor | None, y: Tensor, rstd: Tensor, eps: float, offset: float, scale_in_fp32: bool
) -> None:
    """Write the norm of rows (N, dim) to `y`, and 1 / rms to `rstd` (N,)."""
    num_rows, dim = x.shape
    block_size = triton.next_power_of_2(dim)
    if num_rows:
        forward_kernel[(num_rows,)](
            x, x if weight is None else weight, y, rstd, x.stride(0), dim, eps, offset,
            BLOCK_SIZE=block_size, HAS_WEIGHT=weight is not None, SCALE_IN_FP32=scale_in_fp32,
            num_warps=choose_num_warps(block_size), enable_fp_fusion=False,
        )  # fmt: skip


def backward(  # noqa: PLR0913
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    grad_x: Tensor,
    partial_sums: Tensor,
    offset: float,
    scale_in_fp32: bool,
) -> None:
    """Write the gradient of `x` to `grad_x`, and sums of weight gradients to `partial_sums` (blocks, dim), if any."""
    num_rows, dim = x.shape
    # Without partial sums, four rows per program use the device well; with them, as many as rms_norm.py allocated.
    rows_per_program = -(-num_rows // len(partial_sums)) if len(partial_sums) else 4
    block_size = triton.next_power_of_2(dim)
    if num_rows:
        backward_kernel[(triton.cdiv(num_rows, rows_per_program),)](
            grad_output, x, x if weight is None else weight, rstd, grad_x, partial_sums,
            grad_output.stride(0), x.stride(0), num_rows, rows_per_program, dim, offset,
            BLOCK_SIZE=block_size, HAS_WEIGHT=weight is not None, SCALE_IN_FP32=scale_in_fp32,
            NEEDS_WEIGHT_GRAD=len(partial_sums) > 0, num_warps=choose_num_warps(block_size),
        )  # fmt: skip
