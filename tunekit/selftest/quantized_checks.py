"""Weights in four and eight bits: quantization, dequantization, and products in both directions."""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import float8, gemv, nf4
from tunekit.selftest.compare import BF16, DTYPE_NAMES, FP32, Comparison, require_fast_version, require_triton_launches
from tunekit.selftest.context import Context
from tunekit.selftest.result import CheckSkippedError, Result

OUT, INNER = 160, 512
ROWS = (1, 40)  # a generated token, and a training step


class Stored(NamedTuple):
    """A quantized weight (OUT, INNER)."""

    packed: Tensor
    scales: Tensor
    outer_scales: Tensor | None

    def to(self, device: torch.device) -> "Stored":
        return Stored(*(None if x is None else x.to(device) for x in self))  # type: ignore[arg-type]


def check_four_bits(kind: str, context: Context) -> Result:
    """Codes and scales, numbers, and products, with scales in fp32 and in eight bits."""
    comparison = Comparison(context, require_fast_version(context, nf4))
    weight = torch.randn(OUT, INNER)
    packed, scales = nf4.quantize_reference(weight.flatten(), kind)
    actual_packed, actual_scales = nf4.quantize(weight.to(context.device), kind)
    # A device may round a quotient to the other side of a boundary between two codes.
    comparison.check_equal("quantized codes", actual_packed, packed, max_fraction=1e-4)
    comparison.check("scales", actual_scales, scales)
    codes, outer_scales = nf4.double_quantize(scales)
    plain = Stored(packed.view(OUT, -1), scales.view(torch.uint8).view(OUT, -1), None)
    double_quantized = Stored(packed.view(OUT, -1), codes.view(OUT, -1), outer_scales.view(torch.uint8))
    with require_triton_launches(context):
        for name, stored in (("scales in fp32", plain), ("scales in 8 bits", double_quantized)):
            unpacked = nf4.unpack_scales(stored.scales, stored.outer_scales)
            expected = nf4.dequantize_reference(stored.packed, unpacked, kind)
            check_stored(comparison, name, (nf4, kind), stored, expected)
    return comparison.result()


check_nf4, check_fp4 = partial(check_four_bits, "nf4"), partial(check_four_bits, "fp4")


def check_stored(
    comparison: Comparison, name: str, codec: tuple[ModuleType, str], stored: Stored, expected: Tensor
) -> None:
    """Compare the numbers of a quantized weight, and products with it, with those of the dense weight."""
    module, kind = codec
    moved = stored.to(comparison.device)
    for dtype, label in DTYPE_NAMES.items():
        actual = module.dequantize(*moved, kind, dtype)
        comparison.check(f"{name}, dequantized to {label}", actual, expected)
        for rows in ROWS:
            inputs = {"x": torch.randn(rows, INNER).to(dtype)}
            fast, reference = partial(product, codec, moved), partial(F.linear, weight=expected)
            comparison.check_function(f"{name}, product of {rows} rows in {label}", fast, reference, inputs)
        with torch.no_grad():  # generation takes another way
            x = torch.randn(1, INNER).to(dtype)
            generated = product(codec, moved, x.to(comparison.device))
            comparison.check(f"{name}, product without gradients in {label}", generated, x.float() @ expected.T)


def product(codec: tuple[ModuleType, str], stored: Stored, x: Tensor) -> Tensor:
    module, kind = codec
    return module.matmul(x, *stored, kind)


def check_float8(context: Context) -> Result:
    """Codes of e4m3 with a scale for 64 numbers."""
    comparison = Comparison(context, "Triton" if context.device.type == "cuda" else "torch")
    weight = torch.randn(OUT, INNER)
    blocks = weight.view(-1, nf4.BLOCK)
    scales = blocks.abs().amax(1) / float8.MAX_VALUE
    codes = (blocks / scales[:, None]).to(torch.float8_e4m3fn)
    packed, actual_scales = float8.quantize(weight.to(context.device))
    comparison.check_equal("quantized codes", packed, codes.view(torch.uint8).flatten(), max_fraction=1e-4)
    comparison.check("scales", actual_scales, scales)
    stored = Stored(codes.view(torch.uint8).view(OUT, INNER), scales.view(torch.uint8).view(OUT, -1), None)
    expected = (codes.float() * scales[:, None]).view(OUT, INNER)
    with require_triton_launches(context):
        check_stored(comparison, "float8", (float8, "float8"), stored, expected)
    return comparison.result()


def check_gemv(context: Context) -> Result:
    """Products of up to eight rows of bf16 on the CPU, as in generation."""
    if context.device.type != "cpu":
        raise CheckSkippedError("a kernel for the CPU")
    comparison = Comparison(context, require_fast_version(context, gemv))
    weight, bias = torch.randn(300, INNER).to(BF16), torch.randn(300).to(BF16)
    with torch.no_grad():
        for rows in range(1, gemv.MAX_ROWS + 1):
            x = torch.randn(rows, INNER).to(BF16)
            expected = F.linear(x.to(FP32), weight.to(FP32), bias.to(FP32))
            comparison.check(f"{rows} rows", gemv.gemv(x, weight, bias), expected)
    return comparison.result()
