"""Gated activations equal float64, plain torch and transformers."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels import glu
from tunekit.kernels.glu import ACTIVATIONS, gated_activation

KERNEL = glu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FAST = sorted(glu.FUSED_ACTIVATIONS)


@pytest.fixture(autouse=True)
def without_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the compiled kernel for small tensors too."""
    monkeypatch.setattr(glu, "MIN_SIZE", 0)


def outputs_and_grads(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    weights = torch.arange(y.numel(), device=y.device).cos().view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def float64_results(act: str, *leaves: Tensor) -> list[Tensor]:
    float64_leaves = [t.detach().double().requires_grad_() for t in leaves]
    return outputs_and_grads(ACTIVATIONS[act](*float64_leaves), *float64_leaves)


@pytest.mark.parametrize(("act", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"),
                                           ("gelu_tanh", "gelu_new")])  # fmt: skip
def test_activations_equal_transformers(act: str, name: str, backend: str) -> None:
    gate, up = 3 * torch.randn(2, 50), torch.randn(2, 50)
    assert relative_error(gated_activation(act, gate, up), ACT2FN[name](gate) * up) < 1e-6


@pytest.mark.parametrize("act", FAST)
def test_all_bf16_numbers(act: str) -> None:
    """silu equals torch bit for bit. The others are closer to float64 than torch, which cancels digits."""
    numbers = torch.arange(2**16).to(torch.uint16).view(BF16)
    numbers = numbers[numbers.isfinite()]
    up = torch.ones_like(numbers)
    actual, torch_result, expected = (
        gated_activation(act, numbers, up),
        ACTIVATIONS[act](numbers, up),
        ACTIVATIONS[act](numbers.double(), up.double()),
    )
    is_large = numbers > -80  # below that, results are smaller than 1e-33
    if act == "silu":
        assert torch.equal(actual[is_large], torch_result[is_large])
    errors, torch_errors = ((x.double() - expected).abs() / (expected.abs() + 1e-12) for x in (actual, torch_result))
    assert errors[is_large].mean() <= torch_errors[is_large].mean() * 1.001 and actual.isfinite().all()
    assert actual[~is_large].abs().max() < 1e-30


@pytest.mark.parametrize("act", FAST)
def test_extreme_fp32_numbers(act: str, backend: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 20.0, 90.0, 1e30, -20.0, -90.0, -1e5, 3e38, float("nan")])
    actual = gated_activation(act, gate, torch.ones_like(gate))
    expected = ACTIVATIONS[act](gate.double(), torch.ones_like(gate).double())
    assert actual[:-1].isfinite().all() and actual[-1].isnan()
    assert torch.allclose(actual[:-1].double(), expected[:-1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("act", FAST)
@pytest.mark.parametrize("view", [
    lambda x: x.chunk(2, -1), lambda x: x[..., ::2].chunk(2, 0), lambda x: (x[:, 1], x[:, 0]),
    lambda x: (x[:1, :1].expand(3, 4, -1), x[1:2, :1].expand(3, 4, -1)), lambda x: (x.mT, x.mT),
    lambda x: (x[:0], x[:0]),
])  # fmt: skip
def test_strided_tensors(view, act: str, backend: str) -> None:
    gate, up = (x.detach().requires_grad_() for x in view(torch.randn(2, 6, 64)))
    actual = outputs_and_grads(gated_activation(act, gate, up), gate, up)
    for result, expected in zip(actual, float64_results(act, gate, up), strict=True):
        assert not result.numel() or relative_error(result.double(), expected) < 4e-6


def test_only_inputs_are_saved() -> None:
    if glu.compiled() is None:
        pytest.skip("no compiler")
    saved: list[Tensor] = []
    gate, up = (torch.randn(200, 100, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_activation("silu", gate, up)
    assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()} and len(saved) == 2


def test_gradient_of_a_single_input(backend: str) -> None:
    gate, up = torch.randn(9, 30, requires_grad=True), torch.randn(9, 30)
    for leaf in (gate, up.requires_grad_()):
        other = up if leaf is gate else gate
        y = (
            gated_activation("silu", gate, other.detach())
            if leaf is gate
            else gated_activation("silu", gate.detach(), up)
        )
        expected = float64_results("silu", gate, up)
        assert relative_error(outputs_and_grads(y, leaf)[1].double(), expected[1 if leaf is gate else 2]) < 1e-6


def test_checkpointed_compiled_and_traced(backend: str) -> None:
    gate, up = (torch.randn(40, 64, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(gated_activation("silu", gate, up).square().sum(), (gate, up))
    checkpointed = checkpoint(lambda: gated_activation("silu", gate, up).square().sum(), use_reentrant=False)
    compiled = torch.compile(
        lambda: gated_activation("silu", gate, up).square().sum(), backend="aot_eager", fullgraph=True
    )
    for loss in (checkpointed, compiled()):
        for a, b in zip(torch.autograd.grad(loss, (gate, up)), expected, strict=True):
            assert relative_error(a, b) < 1e-6
    if backend == "fast":
        checks = "test_schema", "test_faketensor", "test_autograd_registration"
        torch.library.opcheck(glu.gated_activation_op.op, (gate, up, "silu"), test_utils=checks)


def test_unsupported_dtypes_use_torch(backend: str) -> None:
    gate, up = torch.randn(4, 64).to(FP16), torch.randn(4, 64).to(FP16)
    assert relative_error(gated_activation("silu", gate, up).double(), float64_results("silu", gate, up)[0]) < 2e-3


@pairwise(shape=[(5, 60), (1, 2500), (3, 1100)], dtype=[FP32, BF16], act=FAST)
def test_interpreted_kernel_equals_float64(shape, dtype, act: str, interpreted: ModuleType) -> None:
    both = (4 * torch.randn(2, *shape)).to(dtype)
    gate, up = both.transpose(0, 1).unbind(1)  # rows are interleaved
    y, grad_gate, grad_up = (torch.empty(shape, dtype=dtype) for _ in range(3))
    weights = torch.arange(y.numel()).cos().view_as(y).to(dtype)
    interpreted.forward(gate, up, y, act)
    interpreted.backward(weights, gate, up, grad_gate, grad_up, act)
    # The interpreter truncates where a GPU rounds.
    for result, expected in zip((y, grad_gate, grad_up), float64_results(act, gate, up), strict=True):
        assert relative_error(result.double(), expected) < (3e-6 if dtype == FP32 else 3e-2)
