"""Products whose weights are of another dtype, against the same in plain torch."""

import pytest
import torch
from torch import Tensor

from tests.checkpoints import error
from tunekit.kernels.linear import linear, reference

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def made(inner: torch.dtype, kept: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 9, 13), inner), ((7, 13), kept), ((7,), kept)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in shapes]


def results(product, inputs: list[Tensor]) -> list[Tensor]:
    y = product(*inputs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize(("inner", "kept"), [(BF16, FP32), (FP32, BF16), (FP32, FP64), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("product", [linear, reference])
def test_products_and_gradients(product, inner: torch.dtype, kept: torch.dtype) -> None:
    inputs = made(inner, kept)
    wanted = results(reference, [t.detach().double().requires_grad_() for t in inputs])
    found = results(product, inputs)
    assert [t.dtype for t in found] == [inner, inner, kept, kept]
    for a, b in zip(found, wanted, strict=True):
        assert error(a.double(), b) < (1e-2 if BF16 in (inner, kept) else 1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_no_cast_is_kept(trained: bool) -> None:
    """Kept are the input, for the gradient of a trained weight, and the weight as it is."""
    x, weight, bias = made(BF16, FP32)
    kept: list[Tensor] = []
    weight.requires_grad_(trained)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, weight, bias)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in ([x] if trained else []) + [weight]}
