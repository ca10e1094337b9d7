"""Four-bit weights on a GPU: to numbers in one launch; products of few rows. nf4.py loads this where there is one."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# There is no Triton on macOS and Windows, nor a GPU that would load this file.

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # bytes of one program, two numbers in each
BLOCK, NESTED = tl.constexpr(64), tl.constexpr(256)  # numbers with one scale; scales with one of their own
BYTES = tl.constexpr(32)  # of numbers with one scale
BLOCKS = 16  # blocks that one program quantizes: 40 registers on sm_90 with bf16 weights; 32 blocks take 224
SMALLEST = 1e-38  # divisor of a block of zeros, as in nf4.py. Subnormal: as a literal, Triton would make it fp64


# The number of groups only places one load: weights of different sizes share one compiled kernel.
@triton.jit(do_not_specialize=["groups"])
def dequantize_kernel(  # noqa: PLR0913 (a launch has no other way to pass them)
    packed, scales, outer, table, fine, out, count, numbers, groups, SIZE: tl.constexpr, NEST: tl.constexpr
):
    # A row for each block: its scale is loaded once, and not for each of its bytes.
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
    """The larger number, or NaN if one of them is NaN, as torch.amax defines it."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def quantize_kernel(  # noqa: PLR0913 (a launch has no other way to pass them)
    weight, bounds, codes, packed, scales, count, smallest, BLOCKS: tl.constexpr, TAIL: tl.constexpr
):
    """Bytes and scales of BLOCKS blocks. TAIL: the last block of the weight is shorter than the others.

    Offsets are int64, and nothing is computed from `count` in int32: weights may have more than 2^31 numbers.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    full = block * BLOCK < count  # the same for a whole block, so that loads and stores can be vectors
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
    rank = tl.full((BLOCKS, BLOCK), 0, tl.int32)  # bounds below the number; all 15 for NaN, as torch.bucketize counts
    for i in tl.static_range(15):
        rank += tl.where(ratio <= tl.load(bounds + i), 0, 1)
    first, second = tl.split(tl.reshape(tl.load(codes + rank), (BLOCKS, BLOCK // 2, 2)))
    to = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(packed + to, (first << 4) | second, 2 * to < count if TAIL else full[:, None])
    tl.store(scales + block, absmax, full)


@triton.jit
def add(a, b):
    return a + b


@triton.jit(do_not_specialize=["groups"])
def few_kernel(  # noqa: PLR0913
    x, packed, scales, outer, table, fine, bias, y, rows, out, width, groups,
    ROWS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, NEST: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`width` are the bytes of a row of the weight."""
    to = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.arange(0, ROWS)
    found = tl.full((OUT, ROWS), 0.0, tl.float32)
    for start in range(0, width, WIDTH):
        at = start + tl.arange(0, WIDTH)
        place = to[:, None].to(tl.int64) * width + at[None, :]
        real = (to < out)[:, None] & (at < width)[None, :]
        byte = tl.load(packed + place, real, 0)
        block = place // (BLOCK // 2)
        scale = tl.load(scales + block, real, 0)
        if NEST:
            largest = tl.load(outer + block // NESTED, real, 0)
            scale = tl.load(fine + scale.to(tl.int32)) * largest + tl.load(outer + groups)
        first = tl.load(table + (byte >> 4).to(tl.int32)) * scale
        second = tl.load(table + (byte & 15).to(tl.int32)) * scale
        first = first.to(x.dtype.element_ty).to(tl.float32)  # the numbers are those of `dequantize`
        second = second.to(x.dtype.element_ty).to(tl.float32)
        there = (row < rows)[:, None] & (at < width)[None, :]
        pair = x + row[:, None] * 2 * width + 2 * at[None, :]
        even, odd = tl.load(pair, there, 0).to(tl.float32), tl.load(pair + 1, there, 0).to(tl.float32)
        both = first[:, None, :] * even[None, :, :] + second[:, None, :] * odd[None, :, :]
        found += tl.reduce(both, 2, add)
    if BIAS:
        found += tl.load(bias + to, to < out, 0).to(tl.float32)[:, None]
    there = (to < out)[:, None] & (row < rows)[None, :]
    tl.store(y + row[None, :] * out + to[:, None], found.to(y.dtype.element_ty), there)


def tile_shape(rows: int) -> tuple[int, int]:
    """Outputs of one program of `few_kernel`, and bytes of each of their weight rows that it looks up at a time.

    Decoding waits for memory, so the bytes that an SM requests at once decide. A projection of 4096 x 4096 has 512
    programs of 8 outputs, 3.9 for each SM of an H200: with tiles of 8 x 128 bytes, 4 KB are in flight, and 25 KB are
    needed for 4.8 TB/s at a latency of 0.7 us. Tiles of 4 x 512 bytes make it 15.5 KB (48 registers, 10 programs fit).
    More rows need the registers for their sums: with 8 of them, wider tiles would take as many bytes and more loads.
    """
    return (4, 512) if rows <= 2 else (8, 128)


def matmul_fused(
    x: Tensor, weight: tuple[Tensor, Tensor, Tensor | None], table: Tensor, fine: Tensor, bias: Tensor | None
) -> Tensor:
    """x W^T + b of few rows (N, in), without the numbers of W in memory: (N, out)."""
    packed, scales, outer = weight
    (out, width), rows = packed.shape, len(x)
    y = x.new_empty(rows, out)
    outputs, bytes_ = tile_shape(rows)
    groups = triton.cdiv(2 * packed.numel(), BLOCK.value * NESTED.value)
    few_kernel[(triton.cdiv(out, outputs),)](
        x.contiguous(),
        packed,
        scales.view(torch.float32) if outer is None else scales,
        table if outer is None else outer.view(torch.float32),
        table,
        fine,
        table if bias is None else bias,
        y,
        rows,
        out,
        width,
        groups,
        ROWS=triton.next_power_of_2(rows),
        OUT=outputs,
        WIDTH=bytes_,
        NEST=outer is not None,
        BIAS=bias is not None,
        enable_fp_fusion=False,
    )
    return y


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
        out.numel(),  # not twice `count` in the kernel: it is an int32 there, and the product may not fit
        groups,
        SIZE=SIZE,
        NEST=kept is scales,
        enable_fp_fusion=False,
    )
    return out


def quantize(weight: Tensor, bounds: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes (n / 2,) and fp32 scales (n / 64,) of numbers (n,), in one launch and without temporary memory."""
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
