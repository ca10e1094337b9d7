"""Gated activations against float64, plain torch and transformers."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from tests.checkpoints import error
from tunekit.kernels import glu
from tunekit.kernels.glu import GATED, gated_activation

KERNEL = glu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FAST = sorted(glu.FAST)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled, for few numbers too."""
    monkeypatch.setattr(glu, "FEW", 0)


def gradients(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    weights = torch.arange(y.numel(), device=y.device).cos().view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def exact(act: str, *leaves: Tensor) -> list[Tensor]:
    wide = [t.detach().double().requires_grad_() for t in leaves]
    return gradients(GATED[act](*wide), *wide)


@pytest.mark.parametrize(("act", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"),
                                           ("gelu_tanh", "gelu_new")])  # fmt: skip
def test_those_of_transformers(act: str, name: str, way: str) -> None:
    gate, up = 3 * torch.randn(2, 50), torch.randn(2, 50)
    assert error(gated_activation(act, gate, up), ACT2FN[name](gate) * up) < 1e-6


@pytest.mark.parametrize("act", GATED)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(7, 9, 64), (3, 1, 5), (20, 900), (1, 9000), (0, 4)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype, act: str, way: str) -> None:
    gate, up = ((4 * torch.randn(shape)).to(dtype).requires_grad_() for _ in range(2))
    found = gradients(gated_activation(act, gate, up), gate, up)
    for mine, wanted in zip(found, exact(act, gate, up), strict=True):
        assert mine.dtype == dtype and mine.shape == wanted.shape
        assert not mine.numel() or error(mine.double(), wanted) < (3e-6 if dtype == FP32 else 2e-2)


@pytest.mark.parametrize("act", FAST)
def test_every_number_of_bf16(act: str) -> None:
    """silu gives torch's bits; the others are nearer to float64 than torch, which subtracts where little is left."""
    numbers = torch.arange(2**16).to(torch.uint16).view(BF16)
    numbers = numbers[numbers.isfinite()]
    up = torch.ones_like(numbers)
    found, plain, wanted = (
        gated_activation(act, numbers, up),
        GATED[act](numbers, up),
        GATED[act](numbers.double(), up.double()),
    )
    usual = numbers > -80  # below that what is left is smaller than 1e-33
    if act == "silu":
        assert torch.equal(found[usual], plain[usual])
    off, theirs = ((x.double() - wanted).abs() / (wanted.abs() + 1e-12) for x in (found, plain))
    assert off[usual].mean() <= theirs[usual].mean() * 1.001 and found.isfinite().all()
    assert found[~usual].abs().max() < 1e-30


@pytest.mark.parametrize("act", FAST)
def test_ends_of_fp32(act: str, way: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 20.0, 90.0, 1e30, -20.0, -90.0, -1e5, 3e38, float("nan")])
    found = gated_activation(act, gate, torch.ones_like(gate))
    wanted = GATED[act](gate.double(), torch.ones_like(gate).double())
    assert found[:-1].isfinite().all() and found[-1].isnan()
    assert torch.allclose(found[:-1].double(), wanted[:-1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("act", FAST)
@pytest.mark.parametrize("of", [
    lambda x: x.chunk(2, -1), lambda x: x[..., ::2].chunk(2, 0), lambda x: (x[:, 1], x[:, 0]),
    lambda x: (x[:1, :1].expand(3, 4, -1), x[1:2, :1].expand(3, 4, -1)), lambda x: (x.mT, x.mT),
])  # fmt: skip
def test_parts_and_strides(of, act: str, way: str) -> None:
    gate, up = (x.detach().requires_grad_() for x in of(torch.randn(2, 6, 64)))
    found = gradients(gated_activation(act, gate, up), gate, up)
    for mine, wanted in zip(found, exact(act, gate, up), strict=True):
        assert error(mine.double(), wanted) < 2e-6


def test_what_is_kept_is_what_came_in() -> None:
    if glu.compiled() is None:
        pytest.skip("no compiler")
    kept: list[Tensor] = []
    gate, up = (torch.randn(200, 100, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_activation("silu", gate, up)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()} and len(kept) == 2


def test_one_of_both_is_trained(way: str) -> None:
    gate, up = torch.randn(9, 30, requires_grad=True), torch.randn(9, 30)
    for leaf in (gate, up.requires_grad_()):
        other = up if leaf is gate else gate
        y = (
            gated_activation("silu", gate, other.detach())
            if leaf is gate
            else gated_activation("silu", gate.detach(), up)
        )
        wanted = exact("silu", gate, up)
        assert error(gradients(y, leaf)[1].double(), wanted[1 if leaf is gate else 2]) < 1e-6


def test_recomputed_compiled_and_traced(way: str) -> None:
    gate, up = (torch.randn(40, 64, requires_grad=True) for _ in range(2))
    wanted = torch.autograd.grad(gated_activation("silu", gate, up).square().sum(), (gate, up))
    again = checkpoint(lambda: gated_activation("silu", gate, up).square().sum(), use_reentrant=False)
    whole = torch.compile(
        lambda: gated_activation("silu", gate, up).square().sum(), backend="aot_eager", fullgraph=True
    )
    for loss in (again, whole()):
        for a, b in zip(torch.autograd.grad(loss, (gate, up)), wanted, strict=True):
            assert error(a, b) < 1e-6
    if way == "fast":
        checks = "test_schema", "test_faketensor", "test_autograd_registration"
        torch.library.opcheck(glu.product, (gate, up, "silu"), test_utils=checks)


def test_dtypes_of_which_the_loops_know_nothing(way: str) -> None:
    gate, up = torch.randn(4, 64).to(FP16), torch.randn(4, 64).to(FP16)
    assert error(gated_activation("silu", gate, up).double(), exact("silu", gate, up)[0]) < 2e-3


@pytest.mark.parametrize("act", FAST)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(5, 60), (1, 2500), (3, 1100)])
def test_on_a_gpu_that_is_interpreted(shape, dtype, act: str, interpreted: ModuleType) -> None:
    both = (4 * torch.randn(2, *shape)).to(dtype)
    gate, up = both.transpose(0, 1).unbind(1)  # rows with others between them
    y, to_gate, to_up = (torch.empty(shape, dtype=dtype) for _ in range(3))
    weights = torch.arange(y.numel()).cos().view_as(y).to(dtype)
    interpreted.forward(gate, up, y, act)
    interpreted.backward(weights, gate, up, to_gate, to_up, act)
    # The interpreter cuts off where a GPU rounds.
    for mine, wanted in zip((y, to_gate, to_up), exact(act, gate, up), strict=True):
        assert error(mine.double(), wanted) < (3e-6 if dtype == FP32 else 3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("act", FAST)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_on_a_gpu(dtype, act: str) -> None:
    gate, up = ((4 * torch.randn(300, 2000)).to(dtype).cuda().requires_grad_() for _ in range(2))
    found = gradients(gated_activation(act, gate, up), gate, up)
    for mine, wanted in zip(found, exact(act, gate, up), strict=True):
        assert error(mine.double(), wanted) < (1e-5 if dtype == FP32 else 2e-2)
