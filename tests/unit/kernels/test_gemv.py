"""Matmuls of a few rows equal float64 and torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import gemv


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


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
