"""Four-bit weights to numbers on a GPU, in one launch. nf4.py loads this where there is one."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# There is no Triton on macOS and Windows, nor a GPU that would load this file.

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # bytes of one program, two numbers in each
BLOCK, NESTED = tl.constexpr(64), tl.constexpr(256)  # numbers with one scale; scales with one of their own


@triton.jit
def dequantize_kernel(  # noqa: PLR0913 (a launch has no other way to pass them)
    packed, scales, outer, table, fine, out, count, groups, SIZE: tl.constexpr, NEST: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    real = at < count
    byte = tl.load(packed + at, real, 0)
    block = at // (BLOCK // 2)
    scale = tl.load(scales + block, real, 0)
    if NEST:
        scale = tl.load(fine + scale.to(tl.int32)) * tl.load(outer + block // NESTED, real, 0) + tl.load(outer + groups)
    first = tl.load(table + (byte >> 4).to(tl.int32)) * scale
    second = tl.load(table + (byte & 15).to(tl.int32)) * scale
    to = tl.program_id(0).to(tl.int64) * 2 * SIZE + tl.arange(0, 2 * SIZE)
    both = tl.reshape(tl.join(first, second), (2 * SIZE,))
    tl.store(out + to, both.to(out.dtype.element_ty), to < 2 * count)


def dequantize(
    packed: Tensor, scales: Tensor, outer: Tensor | None, table: Tensor, fine: Tensor, dtype: torch.dtype
) -> Tensor:
    """Numbers (n,) of bytes (n / 2,). `scales` and `outer` are bytes too, as nf4.py keeps them."""
    count = packed.numel()
    out = torch.empty(2 * count, dtype=dtype, device=packed.device)
    groups = triton.cdiv(2 * count, BLOCK.value * NESTED.value)
    kept = scales.view(torch.float32) if outer is None else scales
    outer = table if outer is None else outer.view(torch.float32)
    # A product and a sum in one would round once, where the reference rounds twice.
    dequantize_kernel[(triton.cdiv(count, SIZE),)](
        packed,
        kept,
        outer,
        table,
        fine,
        out,
        count,
        groups,
        SIZE=SIZE,
        NEST=kept is scales,
        enable_fp_fusion=False,
    )
    return out
