"""Product of few rows and a 4-bit weight, without writing the dequantized weight to memory. Loaded by nf4.py on GPUs.

The limit is the time to read the packed weight. Lookups of code values in memory take many times as long, so
codes are converted in registers: PRMT selects bytes of the fp16 values by four codes at once.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# Triton is not available on macOS and Windows.

import struct
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from tunekit.kernels.argument_checks import check_contiguous, check_tensor
from tunekit.kernels.nf4_codes import TABLES
from tunekit.kernels.nf4_triton import BLOCK_BYTES, BLOCK_SIZE, DOUBLE_QUANT_BLOCK, check_quantized

MAX_ROWS = 16
# The fastest of 7 tiles on an H200, also with one row: 15 us for 4096 x 4096, 40 us for 14336 x 4096. It is still
# limited by instructions: 20 per byte, 0.6 to 0.8 TB/s.
TILE = {"ROWS": MAX_ROWS, "OUTPUTS": 16, "BLOCKS": 4, "SPLIT_K": 4, "num_warps": 4, "num_stages": 1}


def make_conversion_ptx(kind: str) -> str:
    """PTX that converts 4 bytes to the fp16 values of their upper codes ($0, $1) and of their lower codes ($2, $3).

    A selector of PRMT has 4 bits per output byte, as many as a code: the lower three choose one of 8 bytes, here the
    values of 8 codes. So there are two lookups, for codes below and from 8, and the fourth bit chooses between them.
    """
    values = b"".join(struct.pack("<e", value) for value in TABLES[kind])
    planes = {name: values[start::2] for start, name in ((0, "low"), (1, "high"))}
    words = {
        (name, i): f"0x{int.from_bytes(plane[4 * i : 4 * i + 4], 'little'):08x}"
        for name, plane in planes.items()
        for i in range(4)
    }
    lines = ["and.b32 sel, $4, 0x77777777;", "shr.u32 half, $4, 1;", "and.b32 half, half, 0x44444444;"]
    lines += ["or.b32 half, half, 0x32103210;"]
    for upper, lower in (("$0", "$2"), ("$1", "$3")):
        for name in planes:
            first, second, third, fourth = (words[name, i] for i in range(4))
            lines += [f"mov.b32 a, {first};", f"mov.b32 b, {second};", "prmt.b32 a, a, b, sel;"]
            lines += [f"mov.b32 b, {third};", f"mov.b32 c, {fourth};", "prmt.b32 b, b, c, sel;"]
            lines += [f"prmt.b32 {name}, a, b, half;"]
        lines += [f"prmt.b32 {upper}, low, high, 0x7351;", f"prmt.b32 {lower}, low, high, 0x6240;"]
        lines += ["shr.u32 sel, sel, 16;", "shr.u32 half, half, 16;"]
    return "{ .reg .b32 sel, half, a, b, c, low, high; " + " ".join(lines) + " }"


CONVERSIONS = {kind: tl.constexpr(make_conversion_ptx(kind)) for kind in TABLES}
NF4, FP4 = CONVERSIONS["nf4"], CONVERSIONS["fp4"]


@triton.jit
def dequantize_codes(byte, codebook, KIND: tl.constexpr):
    """fp32 values of the upper and of the lower codes. KIND `lookup`: exact, and without PTX."""
    if KIND == "lookup":
        return tl.load(codebook + (byte >> 4).to(tl.int32)), tl.load(codebook + (byte & 15).to(tl.int32))
    asm: tl.constexpr = NF4 if KIND == "nf4" else FP4
    first, second = tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r", [byte], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def add(a, b):  # tl.sum does not work in the interpreter if it was enabled after triton was imported
    return a + b


@triton.jit
def load_scales(scales, outer_scales, dynamic_map, index, mask, num_outer_scales, DOUBLE_QUANT: tl.constexpr):
    """Scales in fp32. With double quantization, the mean of all scales follows the outer scales."""
    scale = tl.load(scales + index, mask, 0)
    if DOUBLE_QUANT:
        scale = tl.load(dynamic_map + scale.to(tl.int32))
        scale = scale * tl.load(outer_scales + index // DOUBLE_QUANT_BLOCK, mask, 0)
        scale = scale + tl.load(outer_scales + num_outer_scales)
    return scale


@triton.jit(do_not_specialize=["num_outer_scales"])
def matmul_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    x, packed, scales, outer_scales, codebook, dynamic_map, bias, y, num_rows, num_outputs, row_bytes, num_outer_scales,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT_K: tl.constexpr,
    KIND: tl.constexpr, DOUBLE_QUANT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y = x W^T + b for up to 16 rows, on tensor cores. Weights are rounded to the dtype of x as in `dequantize`.

    Each warp sums a part of the columns: there are too few tiles of 16 outputs to keep a GPU busy with a warp each.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    num_blocks = row_bytes // BLOCK_BYTES
    first_block = output.to(tl.int64) * num_blocks
    total = tl.full((SPLIT_K, OUTPUTS, ROWS), 0.0, tl.float32)
    for start in range(0, num_blocks, SPLIT_K * BLOCKS):
        block = start + tl.arange(0, SPLIT_K)[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        byte_index = block[:, :, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, None, :]
        mask = (output < num_outputs)[None, :, None] & (block < num_blocks)[:, None, :]
        start_of_row = (first_block * BLOCK_BYTES)[None, :, None, None]
        byte = tl.load(packed + start_of_row + byte_index[:, None], mask[:, :, :, None], 0)
        index = first_block[None, :, None] + block[:, None, :]
        scale = load_scales(scales, outer_scales, dynamic_map, index, mask, num_outer_scales, DOUBLE_QUANT)
        scale = scale[:, :, :, None]
        first, second = dequantize_codes(byte, codebook, KIND)
        dtype = x.dtype.element_ty
        pairs = tl.join((first * scale).to(dtype), (second * scale).to(dtype))
        weight = tl.reshape(pairs, (SPLIT_K, OUTPUTS, 2 * BLOCKS * BLOCK_BYTES))
        first_column = (start + tl.arange(0, SPLIT_K) * BLOCKS)[:, None] * 2 * BLOCK_BYTES
        column = first_column + tl.arange(0, 2 * BLOCKS * BLOCK_BYTES)[None, :]
        x_mask = (column < 2 * row_bytes)[:, :, None] & (row < num_rows)[None, None, :]
        values = tl.load(x + row[None, None, :] * 2 * row_bytes + column[:, :, None], x_mask, 0)
        total = tl.dot(weight, values, total)
    result = tl.reduce(total, 0, add)
    if HAS_BIAS:
        result += tl.load(bias + output, output < num_outputs, 0).to(tl.float32)[:, None]
    out_mask = (output < num_outputs)[:, None] & (row < num_rows)[None, :]
    tl.store(y + row[None, :] * num_outputs + output[:, None], result.to(y.dtype.element_ty), out_mask)


@cache
def max_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Maximum number of rows of `matmul_fused` on a GPU, 0 where it would not use tensor cores."""
    use_dot = dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)
    return MAX_ROWS if use_dot else 0


def matmul_fused(
    x: Tensor,
    weight: tuple[Tensor, Tensor, Tensor | None],
    kind: str,
    codebook: Tensor,
    dynamic_map: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """x W^T + b (N, out) for few rows x (N, in) of bf16 or fp16."""
    packed, scales, outer_scales = weight
    (num_outputs, row_bytes), num_rows = packed.shape, len(x)
    check_quantized(packed, scales, outer_scales)
    check_tensor("nf4", "x", x, (num_rows, 2 * row_bytes), x.dtype, packed.device)
    if bias is not None:
        check_tensor("nf4", "bias", bias, (num_outputs,), bias.dtype, x.device)
        check_contiguous("nf4", "bias", bias)
    y = x.new_empty(num_rows, num_outputs)
    matmul_kernel[(triton.cdiv(num_outputs, TILE["OUTPUTS"]),)](
        x.contiguous(),
        packed,
        scales.view(torch.float32) if outer_scales is None else scales,
        codebook if outer_scales is None else outer_scales.view(torch.float32),
        codebook,
        dynamic_map,
        codebook if bias is None else bias,
        y,
        num_rows,
        num_outputs,
        row_bytes,
        triton.cdiv(2 * packed.numel(), BLOCK_SIZE.value * DOUBLE_QUANT_BLOCK.value),
        KIND=kind if supports_ptx() else "lookup",
        DOUBLE_QUANT=outer_scales is not None,
        HAS_BIAS=bias is not None,
        **TILE,
    )
    return y


def supports_ptx() -> bool:
    """Whether kernels are compiled for an NVIDIA GPU, not for one of AMD, nor run by Triton's interpreter."""
    return isinstance(matmul_kernel, triton.JITFunction) and driver.active.get_current_target().backend == "cuda"
