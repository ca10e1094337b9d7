"""Triton kernels that dequantize and quantize 4-bit weights. Loaded by nf4.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton is not available on macOS and Windows.

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunekit.kernels.argument_checks import check_contiguous, check_shape, check_tensor

SIZE = 1024  # bytes per program, with two values each
BLOCK, NESTED = tl.constexpr(64), tl.constexpr(256)  # values per scale; scales per second-level scale
BYTES = tl.constexpr(32)  # bytes per block
BLOCKS = 16  # blocks that a program quantizes: 40 registers on sm_90 with bf16 weights; 32 blocks take 224
SMALLEST = 1e-38  # MIN_SCALE of nf4.py. An argument, because a subnormal literal would be fp64 in Triton


# `groups` is only the offset of one load: not specializing it lets weights of different sizes share a compiled kernel.
@triton.jit(do_not_specialize=["groups"])
def dequantize_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    packed, scales, outer, table, fine, out, count, numbers, groups, SIZE: tl.constexpr, NEST: tl.constexpr
):
    # One row per block, so that a scale is loaded once and not per byte.
    block = tl.program_id(0).to(tl.int64) * (SIZE // BYTES) + tl.arange(0, SIZE // BYTES)
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(packed + at, at < count, 0)
    real = block * BYTES < count
    scale = tl.load(scales + block, real, 0)
    if NEST:
        scale = tl.load(fine + scale.to(tl.int32)) * tl.load(outer + block // NESTED, real, 0) + tl.load(outer + groups)
    scale = scale[:, None]
    first = tl.load(table + (byte >> 4).to(tl.int32)) * scale
    second = tl.load(table + (byte & 15).to(tl.int32)) * scale
    to = tl.program_id(0).to(tl.int64) * 2 * SIZE + tl.arange(0, 2 * SIZE)
    both = tl.reshape(tl.join(first, second), (2 * SIZE,))
    tl.store(out + to, both.to(out.dtype.element_ty), to < numbers)


@triton.jit
def larger_or_nan(a, b):
    """Maximum that propagates NaN, like torch.amax."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def quantize_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    weight, bounds, codes, packed, scales, count, smallest, BLOCKS: tl.constexpr, TAIL: tl.constexpr
):
    """Quantize BLOCKS blocks to bytes and scales. TAIL: the last block of the weight is shorter than the others.

    Offsets are int64, and `count` is not used in int32 arithmetic: weights may have more than 2^31 values.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    full = block * BLOCK < count  # constant within a block, so that loads and stores can be vectorized
    real = index < count if TAIL else full[:, None]
    x = tl.load(weight + index, real, 0).to(tl.float32)
    absmax = tl.reduce(tl.abs(x), 1, larger_or_nan)
    divisor = tl.where(absmax < smallest, smallest, absmax)
    ratio = x * tl.math.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), divisor)[:, None]
    if TAIL:
        short = (block + 1) * BLOCK > count
        ratio = tl.where(short[:, None], tl.math.div_rn(x, tl.broadcast_to(divisor[:, None], (BLOCKS, BLOCK))), ratio)
        ratio = tl.where(real, ratio, 0.0)
        absmax = tl.where(short, divisor, absmax)
    rank = tl.full((BLOCKS, BLOCK), 0, tl.int32)  # number of bounds below x; 15 for NaN, like torch.bucketize
    for i in tl.static_range(15):
        rank += tl.where(ratio <= tl.load(bounds + i), 0, 1)
    first, second = tl.split(tl.reshape(tl.load(codes + rank), (BLOCKS, BLOCK // 2, 2)))
    to = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(packed + to, (first << 4) | second, 2 * to < count if TAIL else full[:, None])
    tl.store(scales + block, absmax, full)


def check_quantized(packed: Tensor, scales: Tensor, outer: Tensor | None) -> None:
    """Raise ValueError unless there are as many scales as blocks, stored contiguously as bytes. See NF4Weight."""
    blocks = triton.cdiv(2 * packed.numel(), BLOCK.value)
    for name, x in (("packed", packed), ("scales", scales), ("outer", outer)):
        if x is not None:
            check_tensor("nf4", name, x, x.shape, torch.uint8, packed.device)
            check_contiguous("nf4", name, x)
    check_shape("nf4", "scales", scales.view(-1), (blocks * (4 if outer is None else 1),))
    if outer is not None:
        check_shape("nf4", "outer", outer, (4 * (triton.cdiv(blocks, NESTED.value) + 1),))


def dequantize(
    packed: Tensor, scales: Tensor, outer: Tensor | None, table: Tensor, fine: Tensor, dtype: torch.dtype
) -> Tensor:
    """Dequantize bytes (n / 2,) to values (n,). `scales` and `outer` are bytes too, as in nf4.py."""
    check_quantized(packed, scales, outer)
    count = packed.numel()
    out = torch.empty(2 * count, dtype=dtype, device=packed.device)
    groups = triton.cdiv(2 * count, BLOCK.value * NESTED.value)
    scale_values = scales.view(torch.float32) if outer is None else scales
    outer = table if outer is None else outer.view(torch.float32)
    # Without fused multiply-add, whose single rounding would differ from the reference.
    dequantize_kernel[(triton.cdiv(count, SIZE),)](
        packed,
        scale_values,
        outer,
        table,
        fine,
        out,
        count,
        out.numel(),  # not computed as 2 * count in the kernel, which may overflow int32
        groups,
        SIZE=SIZE,
        NEST=scale_values is scales,
        enable_fp_fusion=False,
    )
    return out


def quantize(weight: Tensor, bounds: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize values (n,) to bytes (n / 2,) and fp32 scales (n / 64,), in one launch without temporary memory."""
    count, size = weight.numel(), BLOCK.value
    packed = torch.empty(triton.cdiv(count, 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(triton.cdiv(count, size), dtype=torch.float32, device=weight.device)
    if count:
        quantize_kernel[(triton.cdiv(count, BLOCKS * size),)](
            weight,
            bounds,
            codes,
            packed,
            scales,
            count,
            SMALLEST,
            BLOCKS=BLOCKS,
            TAIL=count % size > 0,
            enable_fp_fusion=False,
        )
    return packed, scales
