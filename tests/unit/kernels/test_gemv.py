"""Matmuls of a few rows equal float64 and torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.pairwise import pairwise
from tunekit.kernels import gemv


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pairwise(
    rows=[(1,), (2, 1), (3, 1), (2, 2), (5,), (6,), (7,), (8,), (9,), (15,), (16,), (17,)],
    shape=[(1, 1), (3, 31), (33, 32), (64, 96), (70, 577), (300, 192), (300, 200)],
    bias=[False, True],
)
def test_products_equal_float64(rows: tuple[int, ...], shape: tuple[int, int], bias: bool) -> None:
    weight, x, b = random(*shape), random(*rows, shape[1], seed=1), random(shape[0], seed=2) if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    with torch.no_grad():
        actual = gemv.gemv(x, weight, b)
    assert actual.shape == expected.shape and actual.dtype == torch.bfloat16
    scale = x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)
    assert ((actual - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * scale).all()


@pytest.mark.parametrize("width", [64, 67])
def test_strided_tensors(width: int) -> None:
    weight, x = random(140, 96)[::2, 3 : 3 + width], random(4, 200)[:, 5 : 5 + width]
    with torch.no_grad():
        torch.testing.assert_close(gemv.gemv(x, weight), F.linear(x, weight))


def test_matmuls_of_torch_in_turns() -> None:
    """Both use tile registers, whose shapes are a state of the thread."""
    weight, x = random(256, 256), random(8, 256, seed=1)
    with torch.no_grad():
        expected = F.linear(x, weight)
        for _ in range(3):
            torch.testing.assert_close(gemv.gemv(x, weight), expected)
            assert torch.equal(F.linear(x, weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half], ids=str)
def test_other_dtypes_equal_torch(dtype: torch.dtype) -> None:
    weight, x = random(5, 64).to(dtype), random(2, 64).to(dtype)
    with torch.no_grad():
        assert torch.equal(gemv.gemv(x, weight), F.linear(x, weight))
        assert gemv.gemv(x[:0], weight).shape == (0, 5)


def test_gradients_equal_torch() -> None:
    weight, x = random(5, 64).requires_grad_(), random(2, 64).requires_grad_()
    gemv.gemv(x, weight).sum().backward()
    assert torch.equal(x.grad, weight.sum(0).expand_as(x)) and weight.grad is not None
