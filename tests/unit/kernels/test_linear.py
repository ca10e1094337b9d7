"""Matmuls with weights of another dtype save no cast."""

import pytest
import torch
from torch import Tensor

from tunekit.kernels.linear import linear


@pytest.mark.parametrize("trained", [True, False])
def test_no_cast_is_saved(trained: bool) -> None:
    """Only the weight, and the input if the weight is trained, are saved, both in their own dtype."""
    x = torch.randn(2, 9, 13).bfloat16().requires_grad_()
    weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((7, 13), (7,)))
    saved: list[Tensor] = []
    weight.requires_grad_(trained)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, weight, bias)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in ([x] if trained else []) + [weight]}
