"""Matmuls with weights of another dtype equal plain torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels.linear import linear, reference

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def make_inputs(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 9, 13), x_dtype), ((7, 13), weight_dtype), ((7,), weight_dtype)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in shapes]


def results(product, inputs: list[Tensor]) -> list[Tensor]:
    y = product(*inputs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [(BF16, FP32), (FP32, BF16), (FP32, FP64), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("product", [linear, reference])
def test_products_and_gradients_equal_float64(product, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    inputs = make_inputs(x_dtype, weight_dtype)
    expected = results(reference, [t.detach().double().requires_grad_() for t in inputs])
    actual = results(product, inputs)
    assert [t.dtype for t in actual] == [x_dtype, x_dtype, weight_dtype, weight_dtype]
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a.double(), b) < (1e-2 if BF16 in (x_dtype, weight_dtype) else 1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_no_cast_is_saved(trained: bool) -> None:
    """Only the weight, and the input if the weight is trained, are saved, both in their own dtype."""
    x, weight, bias = make_inputs(BF16, FP32)
    saved: list[Tensor] = []
    weight.requires_grad_(trained)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, weight, bias)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in ([x] if trained else []) + [weight]}
