"""Example calls of kernels for weights in four and eight bits, and of products of few rows."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import float8, gemv, nf4, nf4_codes
from tunekit.kernels.kernel_case import BF16, DTYPES, FP32, Kernel, KernelCase, compiled_kernel, require_library

SIZES = ((160, 512), (33, 64))  # out, in
# Rows, and whether there is a bias: a generated token, a few of them, and a training step.
ROWS = ((1, False), (5, True), (40, False), (40, True))
GEMV_SIZES = ((1, 1), (3, 31), (64, 96), (70, 577), (300, 200))


class QuantizedWeight(NamedTuple):
    """A weight (out, in) as a layer stores it."""

    packed: Tensor
    scales: Tensor
    outer_scales: Tensor | None

    def to(self, device: torch.device) -> "QuantizedWeight":
        outer_scales = None if self.outer_scales is None else self.outer_scales.to(device)
        return QuantizedWeight(self.packed.to(device), self.scales.to(device), outer_scales)


def four_bit_cases(kind: str, device: torch.device) -> Iterator[KernelCase]:
    """Codes and scales, numbers, and products, with scales in fp32 and in eight bits."""
    for out, inner in SIZES:
        weight = torch.randn(out, inner)
        function, reference = partial(nf4.quantize, kind=kind), partial(nf4.quantize_reference, kind=kind)
        yield KernelCase(f"quantized, {out} x {inner}", function, reference, {"weight": weight.flatten()}, False)
        for name, is_nested in (("scales in fp32", False), ("scales in 8 bits", True)):
            stored = quantize_four_bits(weight, kind, is_nested)
            exact = dequantize_definition(stored, kind)
            yield from product_cases(f"{name}, {out} x {inner}", (nf4, kind), stored.to(device), exact)


def quantize_four_bits(weight: Tensor, kind: str, nested: bool) -> QuantizedWeight:
    """Quantize a weight (..., in) with torch operations."""
    packed, scales = nf4.quantize_reference(weight.flatten(), kind)
    codes, outer_scales = nf4.double_quantize(scales) if nested else (scales, None)
    packed, codes = (x.view(torch.uint8).view(*weight.shape[:-1], -1) for x in (packed, codes))
    return QuantizedWeight(packed, codes, None if outer_scales is None else outer_scales.view(torch.uint8))


def dequantize_definition(stored: tuple[Tensor, Tensor, Tensor | None], kind: str = "nf4") -> Tensor:
    """Numbers in fp64, by table look-ups."""
    packed, scales, outer_scales = stored
    if outer_scales is None:
        scales = scales.view(FP32).double()
    else:
        largest = outer_scales.view(FP32).double()
        groups = torch.arange(scales.numel()).view(scales.shape) // nf4.DOUBLE_QUANT_BLOCK
        scales = nf4.dynamic_map(packed.device).double()[scales.int()] * largest[groups] + largest[-1]
    codes = torch.stack([packed // 16, packed % 16], -1).flatten(-2)
    return torch.tensor(nf4_codes.TABLES[kind]).double()[codes.int()] * scales.repeat_interleave(nf4.BLOCK, -1)


def product_cases(
    name: str, codec: tuple[ModuleType, str], stored: QuantizedWeight, exact: Tensor
) -> Iterator[KernelCase]:
    """Numbers of a quantized weight, and products with it, in comparison with the dense weight in fp64."""
    (module, kind), (out, inner) = codec, exact.shape
    for label, dtype in DTYPES.items():
        function = partial(module.dequantize, *stored, kind, dtype)
        yield KernelCase(f"{name}, dequantized to {label}", function, lambda: exact, {}, False)
        for rows, has_bias in ROWS:
            inputs = {"x": torch.randn(rows, inner).to(dtype)}
            inputs |= {"bias": torch.randn(out).to(dtype)} if has_bias else {}
            function, reference = partial(multiply, codec, stored), partial(add_product, exact)
            for has_gradients in (True, False):  # generation takes another way
                label_rows = f"{name}, {rows} rows in {label}, {'with' if has_gradients else 'without'} gradients"
                yield KernelCase(label_rows, function, reference, inputs, has_gradients)


def multiply(codec: tuple[ModuleType, str], stored: QuantizedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    module, kind = codec
    return module.matmul(x, *stored, kind, bias)


def add_product(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def float8_cases(device: torch.device) -> Iterator[KernelCase]:
    """Codes of e4m3 with a scale for 64 numbers."""
    for out, inner in SIZES:
        weight = torch.randn(out, inner)
        blocks = weight.double().view(-1, nf4.BLOCK)
        scales = (blocks.abs().amax(1) / float8.MAX_VALUE).float()
        codes = (blocks / scales[:, None]).to(torch.float8_e4m3fn)
        packed = codes.view(torch.uint8)
        inputs, expected = {"weight": weight}, (packed.flatten(), scales)
        yield KernelCase(f"quantized, {out} x {inner}", float8.quantize, lambda x, y=expected: y, inputs, False)
        stored = QuantizedWeight(packed.view(out, inner), scales.view(torch.uint8).view(out, -1), None)
        exact = (codes.double() * scales[:, None]).view(out, inner)
        yield from product_cases(f"{out} x {inner}", (float8, "float8"), stored.to(device), exact)


def gemv_cases(device: torch.device) -> Iterator[KernelCase]:
    """Products of few rows of bf16 on the CPU, as in generation, each of which is rounded once."""
    for (out, inner), rows in product(GEMV_SIZES, range(1, gemv.MAX_ROWS + 2)):
        shape = (rows, inner) if rows % 2 else (rows // 2, 2, inner)
        inputs = {"x": torch.randn(shape), "weight": torch.randn(out, inner)}
        inputs |= {"bias": torch.randn(out)} if rows % 2 else {}
        inputs = {name: x.to(BF16) for name, x in inputs.items()}
        yield KernelCase(f"{out} x {inner}, {rows} rows", gemv.gemv, F.linear, inputs, False, limit=5e-3)


def float8_version(device: torch.device) -> str:
    return "Triton" if device.type == "cuda" else "torch"


KERNELS = (
    compiled_kernel("nf4", partial(four_bit_cases, "nf4"), nf4),
    compiled_kernel("fp4", partial(four_bit_cases, "fp4"), nf4),
    Kernel("float8", float8_cases, float8_version),
    Kernel("gemv", gemv_cases, partial(require_library, gemv), gemv),
)
