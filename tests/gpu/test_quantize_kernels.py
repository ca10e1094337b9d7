"""Quantization on a GPU: kernels in Triton's interpreter against plain torch, and the peak memory of plain torch."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tunekit.kernels import float8, nf4
from tunekit.plan.memory_tracker import MemoryTracker

KERNELS = Path(nf4.__file__).parent
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def interpret() -> Callable[[str], ModuleType]:
    """Load a module of kernels for Triton's interpreter, under a name of its own."""
    pytest.importorskip("triton")

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"interpreted_{name}", KERNELS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            spec.loader.exec_module(module)
        return module

    return load


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def draw_ties(kind: str) -> Tensor:
    """Midpoints between codes and their neighboring fp32 numbers, in a block with a scale of 1."""
    bounds = nf4.midpoints_and_codes(kind, torch.device("cpu"))[0]
    near = torch.cat([bounds, bounds.nextafter(torch.tensor(2.0)), bounds.nextafter(torch.tensor(-2.0))])
    return torch.cat([near, torch.ones(64 - len(near))])


def draw_non_finite(kind: str) -> Tensor:
    x = draw(4, 64)
    x[0, 3], x[1, 4], x[2, 0] = math.nan, math.inf, -math.inf
    return x


WEIGHTS: dict[str, Callable[[str], Tensor]] = {
    "two programs": lambda kind: draw(33, 64),
    "bf16": lambda kind: draw(8, 64).to(BF16),
    "fp16": lambda kind: draw(8, 64).to(FP16),
    "zeros": lambda kind: torch.zeros(2, 64),
    "ties": draw_ties,
    "huge": lambda kind: draw(4, 64).clamp(-3, 3) * 1e38,
    "tiny": lambda kind: draw(4, 64) * 1e-33,
    "subnormal": lambda kind: draw(4, 64) * 1e-39,
    "non-finite": draw_non_finite,
    "short last block": lambda kind: draw(3, 50),
    "odd number": lambda kind: draw(5, 7),
    "subnormal short block": lambda kind: draw(10) * 1e-40,
    "bf16 stack with short last block": lambda kind: draw(3, 5, 30).to(BF16),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("weight_of", WEIGHTS.values(), ids=WEIGHTS)
def test_kernel_quantizes_to_the_same_bits_as_torch(weight_of, kind: str, interpret) -> None:
    """tests/unit/kernels/test_nf4.py compares torch with bitsandbytes."""
    weight = weight_of(kind).reshape(-1)
    packed, scales = interpret("nf4_triton").quantize(weight, *nf4.midpoints_and_codes(kind, torch.device("cpu")))
    expected, absmax = nf4.quantize_reference(weight.float(), kind)
    assert torch.equal(packed, expected)
    assert torch.equal(scales.view(torch.int32), absmax.view(torch.int32))


def test_kernel_quantizes_an_empty_weight(interpret) -> None:
    tables = nf4.midpoints_and_codes("nf4", torch.device("cpu"))
    packed, scales = interpret("nf4_triton").quantize(torch.zeros(0), *tables)
    assert packed.shape == scales.shape == (0,)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_kernel_decodes_every_float8_code(dtype: torch.dtype, interpret) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(11).view(11, 256)  # more than one program, and a part of one
    scales = draw(11, 4).abs() * 3
    decoded = interpret("float8_triton").dequantize(codes, scales, dtype)
    expected = float8.dequantize_reference(codes, scales, dtype)
    assert decoded.shape == expected.shape and torch.equal(decoded.isnan(), expected.isnan())
    decoded, expected = decoded.nan_to_num(), expected.nan_to_num()
    if dtype == BF16:  # the interpreter truncates, a GPU rounds
        assert ((decoded.view(torch.int16) - expected.view(torch.int16)).abs() <= 1).all()
    else:
        assert torch.equal(decoded, expected)


def nest(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return nf4.double_quantize(weight.float())


@pytest.mark.parametrize("quantize", [nf4.quantize, float8.quantize, nest], ids=["nf4", "float8", "nested scales"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_temporary_memory_does_not_grow_with_the_weight(quantize, dtype: torch.dtype, monkeypatch) -> None:
    """In plain torch, it was 20 bytes for each number of the weight."""
    monkeypatch.setattr(nf4, "native_library", lambda tensor: None)
    weight, piece = draw(2**16).to(FP32 if quantize is nest else dtype), 2**12
    expected = quantize(weight, "nf4")
    for module in (nf4, float8):
        monkeypatch.setattr(module, "QUANTIZE_CHUNK", piece)
    with MemoryTracker() as memory:
        results = quantize(weight, "nf4")
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert memory.peak <= weight.nbytes + sum(result.nbytes for result in results) + 24 * piece
