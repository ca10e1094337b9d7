"""Triton kernels of grouped matmuls, for GPUs on which torch's grouped_mm synchronizes. Loaded by grouped_mm.py.

Rows are sorted by expert, and `ends` (E,), int32 on the device, are the cumulative sizes. Programs search for their
expert, so the host does not need the sizes. Accumulates in fp32. The grid has a program for each possible tile; those
beyond the last tile return immediately. The device does not report invalid sizes, but no program reads or writes
beyond the rows.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton is not available on macOS and Windows.

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunekit.kernels.argument_checks import check_contiguous, check_tensor

# Two stages of these tiles are 48 KB of shared memory, three are 72 KB: of 99 KB on sm_86, 89 and 120.
ROWS, COLUMNS, INNER, NUM_STAGES, NUM_WARPS = 64, 128, 64, 3, 4


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def load_end(ends, index, mask, num_rows):
    """End of the rows of an expert, in [0, num_rows]."""
    return tl.minimum(tl.maximum(tl.load(ends + index, mask, 0), 0), num_rows)


@triton.jit
def find_tile(ends, tile, num_experts, num_rows, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Expert of a tile of rows, its first row, and the end of its rows. The expert is E beyond the last tile."""
    index = tl.arange(0, EXPERTS)
    end = load_end(ends, index, index < num_experts, num_rows)
    start = load_end(ends, index - 1, (index < num_experts) & (index > 0), num_rows)
    num_tiles = tl.where(index < num_experts, (tl.maximum(end - start, 0) + ROWS - 1) // ROWS, 0)
    tile_ends = tl.associative_scan(num_tiles, 0, add)
    expert = tl.reduce(((tile_ends <= tile) & (index < num_experts)).to(tl.int32), 0, add)
    is_expert = index == expert
    first_row = tl.reduce(tl.where(is_expert, start + (tile - tile_ends + num_tiles) * ROWS, 0), 0, add)
    return expert, first_row, tl.reduce(tl.where(is_expert, end, 0), 0, add)


# Row counts differ from batch to batch, so kernels are not specialized on them.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    x, weight, y, ends, num_rows, num_experts, columns, inner, expert_stride, column_stride, inner_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """y[i] = W[e] x[i] for `x` (N, inner) and `weight` (E, columns, inner) with any strides; row i has expert e."""
    expert, first_row, end = find_tile(ends, tl.program_id(0), num_experts, num_rows, EXPERTS, ROWS)
    if expert >= num_experts:
        return
    row = first_row + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    x_rows = x + row.to(tl.int64)[:, None] * inner
    expert_weight = weight + expert.to(tl.int64) * expert_stride + column.to(tl.int64)[None, :] * column_stride
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, inner, INNER):
        offsets = start + k
        a = tl.load(x_rows + offsets[None, :], (row < end)[:, None] & (offsets < inner)[None, :], 0)
        b = tl.load(
            expert_weight + offsets.to(tl.int64)[:, None] * inner_stride,
            (column < columns)[None, :] & (offsets < inner)[:, None],
            0,
        )
        total = tl.dot(a, b, total)
    out = y + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, total.to(y.dtype.element_ty), (row < end)[:, None] & (column < columns)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def outer_kernel(  # noqa: PLR0913
    left, right, y, ends, num_rows, width, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """y[e] = left[e]^T right[e] over the rows of expert e, for `left` (N, width) and `right` (N, columns)."""
    expert = tl.program_id(2)
    end = load_end(ends, expert, expert >= 0, num_rows)
    start = load_end(ends, expert - 1, expert > 0, num_rows)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first_row in range(start, end, INNER):
        token = (first_row + k).to(tl.int64)
        a = tl.load(left + token[None, :] * width + row[:, None], (row < width)[:, None] & (token < end)[None, :], 0)
        b = tl.load(
            right + token[:, None] * columns + column[None, :], (token < end)[:, None] & (column < columns)[None, :], 0
        )
        total = tl.dot(a, b, total)
    out = y + (expert.to(tl.int64) * width + row[:, None]) * columns + column[None, :]
    tl.store(out, total.to(y.dtype.element_ty), (row < width)[:, None] & (column < columns)[None, :])


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[i] W[e] (N, columns) for `x` (N, inner) and `weight` (E, inner, columns) with any strides."""
    x, (num_experts, inner, columns) = x.contiguous(), weight.shape
    check_tensor("grouped_mm", "x", x, (len(x), inner), weight.dtype, weight.device)
    check_ends(ends, num_experts, x.device)
    y = x.new_empty(len(x), columns)
    if y.numel():
        grid = (triton.cdiv(len(x), ROWS) + num_experts, triton.cdiv(columns, COLUMNS))
        expert_stride, inner_stride, column_stride = weight.stride()
        sizes = num_experts, columns, inner, expert_stride, column_stride, inner_stride
        tiles = {"EXPERTS": triton.next_power_of_2(num_experts), "ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": INNER}
        product_kernel[grid](x, weight, y, ends, len(x), *sizes, **tiles, num_stages=NUM_STAGES, num_warps=NUM_WARPS)
    return y


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left[e]^T right[e] (E, p, q) for (N, p) and (N, q); zeros for experts without rows."""
    left, right = left.contiguous(), right.contiguous()
    width, columns = left.shape[1], right.shape[1]
    check_tensor("grouped_mm", "right", right, (len(left), columns), left.dtype, left.device)
    check_ends(ends, len(ends), left.device)
    y = left.new_empty(len(ends), width, columns)
    grid = (triton.cdiv(width, ROWS), triton.cdiv(columns, COLUMNS), len(ends))
    tiles = {"ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": INNER}
    outer_kernel[grid](
        left, right, y, ends, len(left), width, columns, **tiles, num_stages=NUM_STAGES, num_warps=NUM_WARPS
    )
    return y


def check_ends(ends: Tensor, num_experts: int, device: torch.device) -> None:
    check_tensor("grouped_mm", "ends", ends, (num_experts,), torch.int32, device)
    check_contiguous("grouped_mm", "ends", ends)
