"""Eager mode calls kernels directly; whatever looks at operators sees custom operators."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels.attention_cpu import attention_cpu
from tunekit.kernels.glu import gated_activation
from tunekit.kernels.rms_norm import rms_norm
from tunekit.kernels.rope import RopeTables, apply_rope


class OperatorNames(TorchDispatchMode):
    """Names of all operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def rotate(x: Tensor) -> Tensor:
    angle = torch.linspace(0, 1, 40).view(1, 40, 1, 1).expand(2, 40, 1, 16).contiguous()
    return apply_rope(x, x, RopeTables(angle.cos(), angle.sin()))[0]


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.ones(32), 1e-6),
    "rope": rotate,
    "gated_activation": lambda x: gated_activation("silu", x, x * 2),
    "attention": lambda x: attention_cpu(x, x, x, [0.2, 0.0, 0.0, 0.0], None, None),
}


def test_a_profile_of_the_cpu_has_the_operators() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        KERNELS["attention"](torch.randn(2, 40, 8, 32, requires_grad=True)).sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {"tunekit::attention", "tunekit::attention_backward"} <= names


def test_a_second_derivative_is_an_error() -> None:
    x = torch.randn(2, 40, 8, 32, requires_grad=True)
    with pytest.raises(NotImplementedError, match="rms_norm"):
        torch.autograd.grad(KERNELS["rms_norm"](x).sum(), x, create_graph=True)


@pytest.mark.parametrize("name", KERNELS)
def test_a_dispatch_mode_sees_the_operators_and_eager_mode_equals_them(name: str) -> None:
    torch.manual_seed(0)
    values, gradients = torch.randn(2, 40, 8, 32), torch.randn(2, 40, 8, 32)
    with OperatorNames() as seen:
        x = values.clone().requires_grad_()
        y = KERNELS[name](x)
        (expected,) = torch.autograd.grad(y, x, gradients)
    assert {f"tunekit::{name}", f"tunekit::{name}_backward"} - {"tunekit::rope_backward"} <= seen.names
    x = values.clone().requires_grad_()
    actual_y = KERNELS[name](x)
    assert "GeneratedBackward" not in type(actual_y.grad_fn).__name__
    assert torch.equal(actual_y, y)
    assert relative_error(torch.autograd.grad(actual_y, x, gradients)[0], expected) < 1e-6
