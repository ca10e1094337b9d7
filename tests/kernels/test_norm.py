"""The norm against its definition in float64, its reference in plain torch, and transformers in bf16."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.checkpoints import error
from tests.interpreter import needs_loops
from tunekit.kernels import rms_norm as norm
from tunekit.kernels.rms_norm import rms_norm

KERNEL = norm
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [(0.0, False), (1.0, False), (0.0, True)]  # offset and `late`: Llama, Gemma, OLMo
SHAPES = [(7, 9, 64), (3, 1, 5), (130, 576), (1, 33), (70, 100)]


def exact(x: Tensor, weight: Tensor | None, offset: float) -> list[Tensor]:
    """The norm in float64, and gradients of its sum with cosines as weights."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight) if t is not None]
    y = leaves[0] / (leaves[0].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = y if weight is None else y * (leaves[1] + offset)
    return [y.detach(), *torch.autograd.grad(y, leaves, cosines(y))]


def cosines(y: Tensor) -> Tensor:
    return torch.arange(y.numel(), device=y.device).double().cos().view_as(y).to(y.dtype)


def found(x: Tensor, weight: Tensor | None, offset: float, late: bool) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight) if t is not None]
    y = rms_norm(leaves[0], leaves[1] if len(leaves) == 2 else None, 1e-5, offset, late)
    return [y.detach(), *torch.autograd.grad(y, leaves, cosines(y))]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm(scale: float, way: str) -> None:
    x, weight = scale * torch.randn(3, 5, 24), torch.rand(24) + 0.5
    assert error(rms_norm(x, weight, 1e-5).double(), exact(x, weight, 0)[0]) < 1e-6


@pytest.mark.parametrize(("offset", "late"), KINDS)
@pytest.mark.parametrize("kept", [FP32, BF16, None], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype, kept, offset: float, late: bool, way: str) -> None:
    x = torch.randn(shape).to(dtype)
    weight = None if kept is None else (torch.rand(shape[-1]) + 0.5).to(kept)
    mine, wanted = found(x, weight, offset, late), exact(x, weight, offset)
    assert [t.dtype for t in mine] == [dtype, dtype] + ([] if kept is None else [kept])
    for a, b, kind in zip(mine, wanted, (dtype, dtype, dtype if kept == FP32 else kept), strict=False):
        assert error(a.double(), b) < (1e-6 if kind == FP32 else 1e-2)


@pytest.mark.parametrize(("offset", "late"), KINDS)
@pytest.mark.parametrize("kept", [FP32, BF16, None], ids=str)
def test_bf16_rounds_where_the_reference_rounds(kept, offset: float, late: bool) -> None:
    """A sum in another order moves fewer than one number in ten thousand, and by the last bit."""
    x, weight = torch.randn(500, 576).to(BF16), None if kept is None else (torch.rand(576) + 0.5).to(kept)
    mine, wanted = rms_norm(x, weight, 1e-5, offset, late), norm.reference(x, weight, 1e-5, offset, late)
    away = (mine.view(torch.int16) - wanted.view(torch.int16)).abs()
    assert away.max() <= 2 and away.count_nonzero() < 1e-4 * away.numel()


def test_rms_norm_in_bf16_is_that_of_transformers(way: str) -> None:
    x, theirs = torch.randn(7, 9, 64).to(BF16), LlamaRMSNorm(64, 1e-6).to(BF16)
    torch.nn.init.uniform_(theirs.weight, 0.5, 1.5)
    mine = rms_norm(x, theirs.weight, 1e-6)
    assert mine.dtype == BF16
    away = (mine.view(torch.int16) - theirs(x).view(torch.int16)).abs()
    assert away.max() <= 2 and away.count_nonzero() <= 2


@pytest.mark.parametrize("of", [
    lambda x: x[..., :64], lambda x: x[:, ::2, 3:50], lambda x: x.transpose(0, 1), lambda x: x[..., ::2],
    lambda x: x.mT, lambda x: x[:0], lambda x: x[..., :3], lambda x: x[:1, :1].expand(3, 4, -1),
])  # fmt: skip
def test_parts_and_strides(of, way: str) -> None:
    x = of(torch.randn(5, 6, 70))
    weight = torch.rand(2 * x.shape[-1])[::2]
    for mine, wanted in zip(found(x, weight, 0.0, False), exact(x, weight, 0), strict=True):
        assert mine.shape == wanted.shape
        assert not wanted.numel() or error(mine.double(), wanted) < 1e-6 or wanted.abs().max() < 1e-5


def test_gradients_that_are_not_contiguous(way: str) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    (mine,) = torch.autograd.grad(rms_norm(x, None, 1e-5).sum(), x)
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert error(mine.double(), torch.autograd.grad(y.sum(), x)[0].double()) < 1e-5


def test_only_what_is_trained_gets_gradients(way: str) -> None:
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is not None and x.grad is None
    assert not rms_norm(x, weight.detach(), 1e-5).requires_grad
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x, weight.detach(), 1e-5))


def test_what_is_kept_is_the_input_and_a_number_for_each_row() -> None:
    if norm.compiled() is None:
        pytest.skip("no compiler")
    kept: list[Tensor] = []
    x, weight = torch.randn(30, 64).to(BF16).requires_grad_(), torch.ones(64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-5)
    assert sorted(t.numel() for t in kept) == [30, 64, 30 * 64]


def test_recomputed_and_compiled_norms_give_the_same(way: str) -> None:
    x, weight = torch.randn(40, 64, requires_grad=True), torch.rand(64, requires_grad=True)
    wanted = torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), (x, weight))
    again = checkpoint(lambda: rms_norm(x, weight, 1e-5).square().sum(), use_reentrant=False)
    whole = torch.compile(lambda: rms_norm(x, weight, 1e-5).square().sum(), backend="aot_eager", fullgraph=True)
    for loss in (again, whole()):
        for a, b in zip(torch.autograd.grad(loss, (x, weight)), wanted, strict=True):
            assert error(a, b) < 1e-6


def test_the_operator_is_known_to_torch() -> None:
    """As in a graph that somebody else traces."""
    if norm.compiled() is None:
        pytest.skip("no compiler")
    args = torch.randn(6, 16, requires_grad=True), torch.rand(16, requires_grad=True), 1e-5, 0.0, False
    torch.library.opcheck(
        norm.normed, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_the_same_bits_on_any_number_of_threads() -> None:
    x, weight, threads = torch.randn(900, 64).to(BF16), torch.rand(64), torch.get_num_threads()
    torch.set_num_threads(1)
    one = found(x, weight, 0.0, False)
    torch.set_num_threads(3)
    three = found(x, weight, 0.0, False)
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_dtypes_of_which_the_loops_know_nothing() -> None:
    x, weight = torch.randn(4, 64, dtype=FP16), torch.rand(64).to(FP16)
    assert error(rms_norm(x, torch.ones(64), 1e-5).double(), exact(x, None, 0)[0]) < 2e-3
    for mine, wanted in zip(found(x.float(), weight, 0.0, False), found(x.float(), weight.float(), 0.0, False),
                            strict=True):  # fmt: skip
        assert torch.equal(mine.float(), wanted.to(mine.dtype).float())


@needs_loops
@pytest.mark.parametrize(("offset", "late"), KINDS)
@pytest.mark.parametrize("kept", [FP32, BF16, None], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_on_a_gpu_that_is_interpreted(dtype, kept, offset: float, late: bool, interpreted: ModuleType) -> None:
    x, late = torch.randn(70, 2, 100).to(dtype)[:, 1], late or offset != 0  # rows with a gap between them
    weight = None if kept is None else (torch.rand(100) + 0.5).to(kept)
    y, to_x, rstd, parts = torch.empty(70, 100, dtype=dtype), torch.empty(70, 100, dtype=dtype), *map(
        torch.empty, [(70,), (2, 100)])  # fmt: skip
    grad = cosines(y)
    interpreted.forward(x, weight, y, rstd, 1e-5, offset, late)
    interpreted.backward(grad, x, weight, rstd, to_x, parts, offset, late)
    wanted = exact(x, weight, offset)
    bound = 1e-6 if dtype == FP32 and kept != BF16 else 2e-2  # the interpreter cuts off where a GPU rounds
    for mine, true in zip((y, to_x, parts.sum(0)), wanted, strict=False):
        assert error(mine.double(), true) < bound
    interpreted.backward(grad, x, weight, rstd, to_x.zero_(), parts[:0], offset, late)
    assert error(to_x.double(), wanted[1]) < bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("offset", "late"), KINDS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_on_a_gpu(dtype, offset: float, late: bool) -> None:
    x, weight = torch.randn(300, 5120, device="cuda").to(dtype), torch.rand(5120, device="cuda")
    mine, wanted = found(x, weight, offset, late), exact(x, weight, offset)
    for a, b in zip(mine, wanted, strict=True):
        assert error(a.double(), b) < (1e-5 if dtype == FP32 else 1e-2)
