"""All example calls of all kernels equal their references: compiled, by torch operations, and on a GPU."""

import pytest
import torch

from tunekit.kernels import glu, nf4
from tunekit.kernels.kernel_case import Difference, Kernel, KernelCase, KernelUnavailableError
from tunekit.kernels.kernel_table import KERNELS

CPU = torch.device("cpu")


def wrong_results(kernel: Kernel, device: torch.device = CPU) -> list[Difference]:
    torch.manual_seed(0)
    return [d for case in kernel.make_cases(device) for d in case.compare(device) if d.is_too_large]


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glu, "MIN_SIZE", 0)  # use the compiled kernel for small tensors too
    try:
        KERNELS[name].implementation(CPU)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    assert not wrong_results(KERNELS[name])


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.module is not None])
def test_torch_operations_equal_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, kernels are replaced by torch operations."""
    monkeypatch.setattr(KERNELS[name].module, "compiled", lambda: None)
    assert not wrong_results(KERNELS[name])


@pytest.mark.parametrize("size", [64, 640])
def test_products_in_small_tiles_equal_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4, "TILE_SIZE", size)
    assert not wrong_results(KERNELS["nf4"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "gemv"])
def test_gpu_equals_reference(name: str) -> None:
    KERNELS[name].implementation(torch.device("cuda"))
    assert not wrong_results(KERNELS[name], torch.device("cuda"))


@pytest.mark.parametrize("wrong", [float("nan"), 1.001], ids=str)
def test_a_wrong_number_is_too_large(wrong: float) -> None:
    """In an output, and in the gradient of an input."""
    outputs = KernelCase("x", lambda x: x.where(x < 2, wrong * x), lambda x: x, {"x": torch.tensor([1.0, 2.0, 3.0])})
    assert [d.name for d in outputs.compare(CPU) if d.is_too_large] == ["x, output 0", "x, gradient of x"]


@pytest.mark.parametrize(("codes", "is_too_large"), [([0] * 2000, False), ([1] + [0] * 1999, False), ([1, 1], True),
                                                     ([2] + [0] * 1999, True)])  # fmt: skip
def test_codes_may_rarely_differ_by_a_step(codes: list[int], is_too_large: bool) -> None:
    expected = torch.zeros(len(codes), dtype=torch.uint8)
    case = KernelCase("x", lambda: torch.tensor(codes, dtype=torch.uint8), lambda: expected, {}, False, None, 1)
    assert [d.is_too_large for d in case.compare(CPU)] == [is_too_large]
