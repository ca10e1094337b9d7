"""RMSNorm equals its float64 definition, its torch reference, and transformers in bf16."""

from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tests.helpers.triton_interpreter import requires_interpreter_loops
from tunekit.kernels import rms_norm as norm
from tunekit.kernels.elementwise_cases import normalize, normalize_reference
from tunekit.kernels.kernel_case import cosines, run
from tunekit.kernels.rms_norm import rms_norm

KERNEL = norm
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [(0.0, False), (1.0, False), (0.0, True)]  # offset and scale in fp32: Llama, Gemma, OLMo


def float64_results(x: Tensor, weight: Tensor | None, offset: float) -> list[Tensor]:
    """RMSNorm in float64, and gradients of its sum weighted with cosines."""
    leaves = [t.detach().double() for t in (x, weight) if t is not None]
    return run(partial(normalize_reference, offset=offset), leaves, has_gradients=True)


def outputs_and_grads(x: Tensor, weight: Tensor | None, offset: float, scale_in_fp32: bool) -> list[Tensor]:
    leaves = [t.detach() for t in (x, weight) if t is not None]
    return run(partial(normalize, offset=offset, scale_in_fp32=scale_in_fp32), leaves, has_gradients=True)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm_equals_float64(scale: float, backend: str) -> None:
    x, weight = scale * torch.randn(3, 5, 24), torch.rand(24) + 0.5
    assert relative_error(rms_norm(x, weight, 1e-5).double(), float64_results(x, weight, 0)[0]) < 1e-6


@pytest.mark.parametrize(("offset", "scale_in_fp32"), KINDS)
@pytest.mark.parametrize("weight_dtype", [FP32, BF16, None], ids=str)
def test_bf16_rounds_like_the_reference(weight_dtype, offset: float, scale_in_fp32: bool) -> None:
    """Another order of summation changes fewer than one number in ten thousand, by the last bit."""
    x, weight = (
        torch.randn(500, 576).to(BF16),
        None if weight_dtype is None else (torch.rand(576) + 0.5).to(weight_dtype),
    )
    actual = rms_norm(x, weight, 1e-5, offset, scale_in_fp32)
    expected = norm.reference(x, weight, 1e-5, offset, scale_in_fp32)
    distance = (actual.view(torch.int16) - expected.view(torch.int16)).abs()
    assert distance.max() <= 2 and distance.count_nonzero() < 1e-4 * distance.numel()


def test_bf16_equals_transformers(backend: str) -> None:
    x, theirs = torch.randn(7, 9, 64).to(BF16), LlamaRMSNorm(64, 1e-6).to(BF16)
    torch.nn.init.uniform_(theirs.weight, 0.5, 1.5)
    actual = rms_norm(x, theirs.weight, 1e-6)
    assert actual.dtype == BF16
    distance = (actual.view(torch.int16) - theirs(x).view(torch.int16)).abs()
    assert distance.max() <= 2 and distance.count_nonzero() <= 2


@pytest.mark.parametrize("view", [
    lambda x: x[..., :64], lambda x: x[:, ::2, 3:50], lambda x: x.transpose(0, 1), lambda x: x[..., ::2],
    lambda x: x.mT, lambda x: x[:0], lambda x: x[..., :3], lambda x: x[:1, :1].expand(3, 4, -1),
])  # fmt: skip
def test_strided_tensors(view, backend: str) -> None:
    x = view(torch.randn(5, 6, 70))
    weight = torch.rand(2 * x.shape[-1])[::2]
    for actual, expected in zip(outputs_and_grads(x, weight, 0.0, False), float64_results(x, weight, 0), strict=True):
        assert actual.shape == expected.shape
        assert not expected.numel() or relative_error(actual.double(), expected) < 1e-6 or expected.abs().max() < 1e-5


def test_expanded_gradients(backend: str) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    (actual,) = torch.autograd.grad(rms_norm(x, None, 1e-5).sum(), x)
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert relative_error(actual.double(), torch.autograd.grad(y.sum(), x)[0].double()) < 1e-5


def test_only_trained_inputs_get_gradients(backend: str) -> None:
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is not None and x.grad is None
    assert not rms_norm(x, weight.detach(), 1e-5).requires_grad
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x, weight.detach(), 1e-5))


def test_only_the_input_and_a_number_per_row_are_saved() -> None:
    if norm.compiled() is None:
        pytest.skip("no compiler")
    saved: list[Tensor] = []
    x, weight = torch.randn(30, 64).to(BF16).requires_grad_(), torch.ones(64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-5)
    assert sorted(t.numel() for t in saved) == [30, 64, 30 * 64]


def test_checkpointed_and_compiled_norms_are_equal(backend: str) -> None:
    x, weight = torch.randn(40, 64, requires_grad=True), torch.rand(64, requires_grad=True)
    expected = torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), (x, weight))
    checkpointed = checkpoint(lambda: rms_norm(x, weight, 1e-5).square().sum(), use_reentrant=False)
    compiled = torch.compile(lambda: rms_norm(x, weight, 1e-5).square().sum(), backend="aot_eager", fullgraph=True)
    for loss in (checkpointed, compiled()):
        for a, b in zip(torch.autograd.grad(loss, (x, weight)), expected, strict=True):
            assert relative_error(a, b) < 1e-6


def test_operator_is_registered_consistently() -> None:
    """The operator works in graphs that are traced by other code."""
    if norm.compiled() is None:
        pytest.skip("no compiler")
    args = torch.randn(6, 16, requires_grad=True), torch.rand(16, requires_grad=True), 1e-5, 0.0, False
    torch.library.opcheck(
        norm.rms_norm_op.op, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_number_of_threads_does_not_change_bits() -> None:
    x, weight, threads = torch.randn(900, 64).to(BF16), torch.rand(64), torch.get_num_threads()
    torch.set_num_threads(1)
    one_thread = outputs_and_grads(x, weight, 0.0, False)
    torch.set_num_threads(3)
    three_threads = outputs_and_grads(x, weight, 0.0, False)
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one_thread, three_threads, strict=True))


def test_unsupported_dtypes_use_torch() -> None:
    x, weight = torch.randn(4, 64, dtype=FP16), torch.rand(64).to(FP16)
    assert relative_error(rms_norm(x, torch.ones(64), 1e-5).double(), float64_results(x, None, 0)[0]) < 2e-3
    results = (outputs_and_grads(x.float(), w, 0.0, False) for w in (weight, weight.float()))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual.float(), expected.to(actual.dtype).float())


@requires_interpreter_loops
@pairwise(dtype=[FP32, BF16], weight_dtype=[FP32, BF16, None], kind=KINDS)
def test_interpreted_kernel_equals_float64(
    dtype, weight_dtype, kind: tuple[float, bool], interpreted: ModuleType
) -> None:
    offset, scale_in_fp32 = kind
    x, scale_in_fp32 = torch.randn(11, 2, 100).to(dtype)[:, 1], scale_in_fp32 or offset != 0  # strided rows
    weight = None if weight_dtype is None else (torch.rand(100) + 0.5).to(weight_dtype)
    y, grad_x, rstd, partial_sums = torch.empty(11, 100, dtype=dtype), torch.empty(11, 100, dtype=dtype), *map(
        torch.empty, [(11,), (2, 100)])  # fmt: skip
    grad = cosines(y)
    interpreted.forward(x, weight, y, rstd, 1e-5, offset, scale_in_fp32)
    interpreted.backward(grad, x, weight, rstd, grad_x, partial_sums, offset, scale_in_fp32)
    expected = float64_results(x, weight, offset)
    tolerance = 1e-6 if dtype == FP32 and weight_dtype != BF16 else 2e-2  # the interpreter truncates where a GPU rounds
    for actual, target in zip((y, grad_x, partial_sums.sum(0)), expected, strict=False):
        assert relative_error(actual.double(), target) < tolerance
    interpreted.backward(grad, x, weight, rstd, grad_x.zero_(), partial_sums[:0], offset, scale_in_fp32)
    assert relative_error(grad_x.double(), expected[1]) < tolerance
