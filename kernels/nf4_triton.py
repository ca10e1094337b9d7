"""Triton kernels that dequantize and quantize 4-bit weights. Loaded by nf4.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton is not available on macOS and Windows.

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunekit.kernels.argument_checks import check_contiguous, check_shape, check_tensor

PROGRAM_BYTES = 1024  # bytes that a program dequantizes, with two values each
BLOCK_SIZE, DOUBLE_QUANT_BLOCK = tl.constexpr(64), tl.constexpr(256)  # values per scale; scales per outer scale
BLOCK_BYTES = tl.constexpr(32)
BLOCKS = 16  # blocks that a program quantizes: 40 registers on sm_90 with bf16 weights; 32 blocks take 224
MIN_SCALE = 1e-38  # as in nf4.py. An argument, because a subnormal literal would be fp64 in Triton


# `num_outer_scales` is only the offset of one load: not specializing it lets weights of different sizes share a
# compiled kernel.
@triton.jit(do_not_specialize=["num_outer_scales"])
def dequantize_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    packed, scales, outer_scales, codebook, dynamic_map, out, num_bytes, num_values, num_outer_scales,
    BYTES: tl.constexpr, DOUBLE_QUANT: tl.constexpr,
):  # fmt: skip
    # One row per block, so that a scale is loaded once and not per byte.
    block = tl.program_id(0).to(tl.int64) * (BYTES // BLOCK_BYTES) + tl.arange(0, BYTES // BLOCK_BYTES)
    offsets = block[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    byte = tl.load(packed + offsets, offsets < num_bytes, 0)
    block_mask = block * BLOCK_BYTES < num_bytes
    scale = tl.load(scales + block, block_mask, 0)
    if DOUBLE_QUANT:  # the mean of all scales follows the outer scales
        scale = tl.load(dynamic_map + scale.to(tl.int32))
        scale = scale * tl.load(outer_scales + block // DOUBLE_QUANT_BLOCK, block_mask, 0)
        scale = scale + tl.load(outer_scales + num_outer_scales)
    scale = scale[:, None]
    first = tl.load(codebook + (byte >> 4).to(tl.int32)) * scale
    second = tl.load(codebook + (byte & 15).to(tl.int32)) * scale
    out_offsets = tl.program_id(0).to(tl.int64) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    values = tl.reshape(tl.join(first, second), (2 * BYTES,))
    tl.store(out + out_offsets, values.to(out.dtype.element_ty), out_offsets < num_values)


@triton.jit
def maximum_or_nan(a, b):
    """Maximum that propagates NaN, like torch.amax."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def quantize_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    weight, midpoints, sorted_codes, packed, scales, num_values, min_scale,
    BLOCKS: tl.constexpr, HAS_SHORT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCKS blocks to bytes and scales. HAS_SHORT_BLOCK: the last block of the weight is shorter.

    Offsets are int64, and `num_values` is not used in int32 arithmetic: weights may have more than 2^31 values.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    block_mask = block * BLOCK_SIZE < num_values  # constant within a block, so that loads and stores can be vectorized
    mask = offsets < num_values if HAS_SHORT_BLOCK else block_mask[:, None]
    x = tl.load(weight + offsets, mask, 0).to(tl.float32)
    absmax = tl.reduce(tl.abs(x), 1, maximum_or_nan)
    divisor = tl.where(absmax < min_scale, min_scale, absmax)
    ratio = x * tl.math.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), divisor)[:, None]
    if HAS_SHORT_BLOCK:
        is_short = (block + 1) * BLOCK_SIZE > num_values
        ratio = tl.where(
            is_short[:, None], tl.math.div_rn(x, tl.broadcast_to(divisor[:, None], (BLOCKS, BLOCK_SIZE))), ratio
        )
        ratio = tl.where(mask, ratio, 0.0)
        absmax = tl.where(is_short, divisor, absmax)
    rank = tl.full((BLOCKS, BLOCK_SIZE), 0, tl.int32)  # number of midpoints below x; 15 for NaN, like torch.bucketize
    for i in tl.static_range(15):
        rank += tl.where(ratio <= tl.load(midpoints + i), 0, 1)
    first, second = tl.split(tl.reshape(tl.load(sorted_codes + rank), (BLOCKS, BLOCK_SIZE // 2, 2)))
    out_offsets = block[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    tl.store(
        packed + out_offsets,
        (first << 4) | second,
        2 * out_offsets < num_values if HAS_SHORT_BLOCK else block_mask[:, None],
    )
    tl.store(scales + block, absmax, block_mask)


def check_quantized(packed: Tensor, scales: Tensor, outer_scales: Tensor | None) -> None:
    """Raise ValueError unless there are as many scales as blocks, stored contiguously as bytes. See NF4Weight."""
    num_blocks = triton.cdiv(2 * packed.numel(), BLOCK_SIZE.value)
    for name, x in (("packed", packed), ("scales", scales), ("outer_scales", outer_scales)):
        if x is not None:
            check_tensor("nf4", name, x, x.shape, torch.uint8, packed.device)
            check_contiguous("nf4", name, x)
    check_shape("nf4", "scales", scales.view(-1), (num_blocks * (4 if outer_scales is None else 1),))
    if outer_scales is not None:
        check_shape("nf4", "outer_scales", outer_scales, (4 * (triton.cdiv(num_blocks, DOUBLE_QUANT_BLOCK.value) + 1),))


def dequantize(
    packed: Tensor,
    scales: Tensor,
    outer_scales: Tensor | None,
    codebook: Tensor,
    dynamic_map: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize bytes (n / 2,) to values (n,). `scales` and `outer_scales` are bytes too, as in nf4.py."""
    check_quantized(packed, scales, outer_scales)
    num_bytes = packed.numel()
    out = torch.empty(2 * num_bytes, dtype=dtype, device=packed.device)
    num_outer_scales = triton.cdiv(2 * num_bytes, BLOCK_SIZE.value * DOUBLE_QUANT_BLOCK.value)
    scale_values = scales.view(torch.float32) if outer_scales is None else scales
    outer_scales = codebook if outer_scales is None else outer_scales.view(torch.float32)
    # Without fused multiply-add, whose single rounding would differ from the reference.
    dequantize_kernel[(triton.cdiv(num_bytes, PROGRAM_BYTES),)](
        packed,
        scale_values,
        outer_scales,
        codebook,
        dynamic_map,
        out,
        num_bytes,
        out.numel(),  # not computed as 2 * num_bytes in the kernel, which may overflow int32
        num_outer_scales,
        BYTES=PROGRAM_BYTES,
        DOUBLE_QUANT=scale_values is scales,
        enable_fp_fusion=False,
    )
    return out


def quantize(weight: Tensor, midpoints: Tensor, sorted_codes: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize values (n,) to bytes (n / 2,) and fp32 scales (n / 64,), in one launch without temporary memory."""
    num_values, block_size = weight.numel(), BLOCK_SIZE.value
    packed = torch.empty(triton.cdiv(num_values, 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(triton.cdiv(num_values, block_size), dtype=torch.float32, device=weight.device)
    if num_values:
        quantize_kernel[(triton.cdiv(num_values, BLOCKS * block_size),)](
            weight,
            midpoints,
            sorted_codes,
            packed,
            scales,
            num_values,
            MIN_SCALE,
            BLOCKS=BLOCKS,
            HAS_SHORT_BLOCK=num_values % block_size > 0,
            enable_fp_fusion=False,
        )
    return packed, scales
