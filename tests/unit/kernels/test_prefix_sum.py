"""Cumulative sums by products with triangular matrices."""

import pytest
import torch

from tunekit.kernels.prefix_sum import prefix_sum_by_matmul


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 128), (2, 2, 129), (40_000,)])
def test_sums_equal_cumsum(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    y = prefix_sum_by_matmul(x)
    torch.testing.assert_close(y, x.cumsum(-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(z.square().sum(), x)[0] for z in (y, x.cumsum(-1))))


def test_minus_infinity_ends_a_document() -> None:
    x = torch.tensor([[0.5, -torch.inf, 1.0], [1.0, 2.0, 3.0]])
    assert torch.equal(prefix_sum_by_matmul(x).exp(), x.cumsum(-1).exp())
