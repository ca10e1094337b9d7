"""The fused kernel for divergences of distillation, in Triton's interpreter, against definitions in float64."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_interpreter import requires_interpreter_loops
from tunekit.kernels import fake_mode, kl_divergence
from tunekit.kernels.kl_divergence import KLMixture, KLTerms

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = 64  # logits that a program holds at once: small, so that few ids need several turns
MIXTURES = {
    "forward": KLMixture(),
    "reverse": KLMixture(0.0, reverse=1.0, temperature=2.5),
    "symmetric": KLMixture(1.0, reverse=0.5),
    "skewed": KLMixture(forward_skew=0.1),
    "skewed reverse": KLMixture(0.0, reverse=1.0, reverse_skew=0.1, ce_weight=0.25),
    "jensen-shannon": KLMixture(0.3, 0.3, 0.7, 0.7, temperature=1.7),
}
CAPPED = {"skewed", "symmetric", "jensen-shannon"}
IDS, ROWS = (150, 149), 2  # ids of the student, and those that both have


@pytest.fixture(scope="module")
def compute() -> Callable[[Tensor, Tensor, KLTerms, bool], Tensor]:
    """The launch of kl_divergence_triton.py in Triton's interpreter, from a module of its own."""
    pytest.importorskip("triton")
    path = Path(kl_divergence.__file__).with_name("kl_divergence_triton.py")
    spec = importlib.util.spec_from_file_location("interpreted_divergence", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    assert module.MAX_BLOCK_SIZE > SIZE
    module.MAX_BLOCK_SIZE = SIZE
    return lambda student, teacher, terms, gradient: module.divergences(
        student, teacher, terms.values, terms.count, gradient
    )


def log_probabilities(raw: Tensor, scale: float, softcap: float | None, temperature: float) -> Tensor:
    x = raw * scale
    return ((softcap * (x / softcap).tanh() if softcap else x) / temperature).log_softmax(-1)


def define(lp: Tensor, lq: Tensor, by: KLMixture) -> Tensor:
    """Sum of the two KL divergences in a mixture, by their definition."""
    p, q = lp.exp(), lq.exp()
    m = (by.forward_skew * q + (1 - by.forward_skew) * p).log()
    n = (by.reverse_skew * p + (1 - by.reverse_skew) * q).log()
    return (by.forward * q * (lq - m) + by.reverse * p * (lp - n)).sum(-1)


def draw_logits(name: str, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, KLTerms]:
    """Rows of both models, not contiguous, and what to compute of them."""
    vocab, count = IDS
    student = (3 * torch.randn(ROWS, vocab + 10)).to(dtype)[:, :vocab]
    teacher = (3 * torch.randn(ROWS, vocab)).to(dtype)[:, :count]
    student[1, :count] = teacher[1]  # equal, and the argmax agrees
    finish = (0.7, 5.0) if name in CAPPED else (1.3, None)
    return student, teacher, KLTerms(MIXTURES[name], finish, finish, count, None)


@requires_interpreter_loops
@pytest.mark.parametrize("name", MIXTURES)
def test_figures_and_gradient_equal_the_definition(name: str, compute) -> None:
    student, teacher, terms = draw_logits(name)
    by, raw = terms.mixture, student.double().requires_grad_()
    lp = log_probabilities(raw[:, : terms.count], *terms.student, by.temperature)
    lq = log_probabilities(teacher.double(), *terms.teacher, by.temperature)
    losses, p, q = define(lp, lq, by), lp.exp(), lq.exp()
    (expected,) = torch.autograd.grad((1 - by.ce_weight) * losses.sum(), raw)
    figures = [losses, (q * (lq - lp)).sum(-1), -(p * lp).sum(-1), -(q * lq).sum(-1)]
    figures.append((lp.argmax(-1) == lq.argmax(-1)).double())

    original = student.clone()
    without_gradient = compute(student, teacher, terms, False)
    assert torch.equal(student, original)
    computed = compute(student, teacher, terms, True)
    assert torch.equal(computed, without_gradient)
    torch.testing.assert_close(computed.double(), torch.stack(figures, 1).detach(), rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(student.double(), expected, rtol=2e-6, atol=2e-6)
    assert not student[:, terms.count :].any()
    assert computed[:, 4].tolist() == figures[4].tolist() and computed[1, 4] == 1


@requires_interpreter_loops
@pytest.mark.parametrize("name", ["forward", "jensen-shannon"])
def test_bf16_logits(name: str, compute) -> None:
    student, teacher, terms = draw_logits(name, BF16)
    expected = student.float()
    figures = kl_divergence.divergences_reference(expected, teacher, terms, True)
    torch.testing.assert_close(compute(student, teacher, terms, True), figures, rtol=3e-6, atol=3e-6)
    # The interpreter truncates to bf16, a GPU rounds
    torch.testing.assert_close(student.float(), expected, rtol=2**-7, atol=1e-6)


@requires_interpreter_loops
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["forward", "symmetric", "jensen-shannon"])
def test_extreme_logits_give_the_numbers_of_torch(name: str, compute) -> None:
    """Far from zero, far apart, certain, impossible, constant, and NaN."""
    near = torch.randn(20)
    certain = torch.full((20,), -60.0).index_fill(0, torch.tensor(3), 60.0)
    impossible = near.masked_fill(torch.arange(20) % 2 == 0, -torch.inf)
    nan = near.clone()
    nan[7] = torch.nan
    student = torch.stack([near, near + 1e4, 1e3 * near, certain, impossible, torch.zeros(20), nan])
    teacher = student[[1, 0, 4, 2, 5, 3, 0]]
    terms = KLTerms(MIXTURES[name], (1.0, None), (1.0, None), 20, None)
    gradient = student.clone()
    expected = kl_divergence.divergences_reference(gradient, teacher, terms, True)
    torch.testing.assert_close(compute(student, teacher, terms, True), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    # Logarithms are as large as 1e4, where numbers of fp32 are 1e-3 apart
    torch.testing.assert_close(student, gradient, rtol=1e-5, atol=1e-3, equal_nan=True)
    assert student[6].isnan().all() and not student[:6].isnan().any()


def test_no_rows(compute) -> None:
    _, _, terms = draw_logits("forward")
    assert compute(torch.zeros(0, IDS[0]), torch.zeros(0, IDS[1]), terms, True).shape == (0, 5)


def test_logits_on_a_gpu_take_the_fused_kernel() -> None:
    """It allocates nothing but its result, also in a memory plan."""
    student, teacher = torch.empty(8, 100, device="meta"), torch.empty(8, 90, device="meta")
    with fake_mode.fake_mode("cuda"):
        kernel = kl_divergence.choose_kernel(student, teacher, None)
        assert kernel is kl_divergence.divergences_gpu
        assert kernel(student, teacher, KLTerms(KLMixture(), (1.0, None), (1.0, None), 90, None), True).shape == (8, 5)
    kernel = kl_divergence.choose_kernel(torch.zeros(8, 100), torch.zeros(8, 90), None)
    assert kernel is not kl_divergence.divergences_gpu
