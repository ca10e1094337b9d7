"""Chunked KL divergences equal their float64 definitions on full logits, and TRL: values and gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.largest_tensor import LargestTensor
from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels import cross_entropy
from tunekit.kernels import kl_divergence as kernel
from tunekit.kernels.kl_divergence import (
    METRICS,
    FullTargets,
    KLMixture,
    KLTerms,
    TopKTargets,
    linear_kl_divergence,
    top_k_targets,
)
from tunekit.kernels.loss_cases import MIXTURES, finish_logits, kl_definition
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

KERNEL = kernel
FP32, BF16 = torch.float32, torch.bfloat16
PLAIN, CAPPED = (1.0, None), (0.7, 5.0)


def probabilities(raw: Tensor, finish: tuple[float, float | None], temperature: float) -> Tensor:
    return (finish_logits(raw, *finish) / temperature).softmax(-1)


def top_k_with_rest(x: Tensor, ids: Tensor) -> Tensor:
    """Probabilities (n, k + 1) of the given ids, and of all others together."""
    return torch.cat([x.gather(1, ids), x.scatter(1, ids, 0.0).sum(-1, keepdim=True)], dim=1)


def check_in_place(
    divergence: Callable[[Tensor, bool], Tensor],
    student: Tensor,
    count: int,
    expected_stats: list[Tensor],
    expected_grad: Tensor,
) -> None:
    """Check statistics of the student's logits, and gradients written into the first `count` of them."""
    original = student.clone()
    without_grad = divergence(student, False)
    assert torch.equal(student, original), "without gradients the logits are unchanged"
    actual = divergence(student, True)
    assert torch.equal(actual, without_grad)
    torch.testing.assert_close(
        actual[:, : len(expected_stats)].double(), torch.stack(expected_stats, 1), rtol=6e-6, atol=6e-6
    )
    assert not student[:, count:].any()
    limit = 2e-6 if student.dtype == FP32 else 4e-3
    torch.testing.assert_close(student.double(), expected_grad, rtol=limit, atol=limit)


def extreme_rows(impossible_ids: slice) -> Tensor:
    """Logits (6, 40): ordinary, far from 0, far apart, one-hot, partly -inf, and all equal."""
    torch.manual_seed(0)
    ordinary = torch.randn(40)
    one_hot = torch.full((40,), -60.0).index_fill(0, torch.tensor(3), 60.0)
    impossible = ordinary.clone()
    impossible[impossible_ids] = -torch.inf
    return torch.stack([ordinary, ordinary + 1e4, 1e3 * ordinary, one_hot, impossible, torch.zeros(40)])


def check_extreme(divergence: Callable[[Tensor], Tensor], rows: Tensor, teacher: Tensor) -> None:
    """Results are finite, zero for equal distributions, and NaN if a logit is NaN. `teacher` is one row."""
    student = rows.clone()
    stats = divergence(student)
    assert stats.isfinite().all() and student.isfinite().all() and (stats > -1e-5).all()
    same = (rows == teacher).all(-1)
    assert stats[same, :2].abs().max() < 1e-5 and student[same].abs().max() < 1e-5
    student = rows.clone()
    student[2, 7] = torch.nan
    assert divergence(student)[2, 0].isnan() and student[2].isnan().any()


def make_head(dim: int, vocab: int, finish: tuple[float, float | None] = PLAIN, trained: bool = True) -> Head:
    head = Head(DecoderSpec(vocab, dim, (), logit_scale=finish[0], logit_softcap=finish[1]))
    head.weight.data.normal_(std=2 * dim**-0.5)
    return head.requires_grad_(trained)


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "TOKEN_MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 1})


# Logits of a chunk


@pairwise(
    indirect=["backend"],
    backend=("fast", "reference"),
    sizes=[(1, 1), (19, 16), (16, 16), (5000, 4999)],
    name=MIXTURES.keys(),
    dtypes=[(FP32, FP32), (BF16, FP32), (FP32, BF16), (BF16, BF16)],
)
def test_stats_and_in_place_gradients(
    sizes: tuple[int, int], name: str, dtypes: tuple[torch.dtype, torch.dtype], backend: str
) -> None:
    torch.manual_seed(sum(sizes))
    (vocab, count), mixture = sizes, MIXTURES[name]
    kernel_fn = kernel.divergences_cpu if backend == "fast" else kernel.divergences_reference
    for finish in (PLAIN, CAPPED):
        student, teacher = (3 * torch.randn(6, vocab)).to(dtypes[0]), (3 * torch.randn(6, count)).to(dtypes[1])
        raw = student.double().requires_grad_()
        p, q = (
            probabilities(raw[:, :count], finish, mixture.temperature),
            probabilities(teacher, PLAIN, mixture.temperature),
        )
        divergence = kl_definition(p, q, mixture)
        (expected_grad,) = torch.autograd.grad(divergence.sum(), raw)
        expected_stats = [
            divergence,
            kl_definition(p, q, KLMixture()),
            torch.special.entr(p).sum(-1),
            torch.special.entr(q).sum(-1),
        ]
        expected_stats += [(p.argmax(-1) == q.argmax(-1)).double()] if FP32 == dtypes[0] == dtypes[1] else []
        terms = KLTerms(mixture, finish, PLAIN, count, None)
        check_in_place(
            lambda x, gradient, of=(teacher, terms): kernel_fn(x, *of, gradient),
            student,
            count,
            expected_stats,
            expected_grad,
        )


@pytest.mark.parametrize("name", MIXTURES)
def test_extreme_and_impossible_logits(name: str, backend: str) -> None:
    """Impossible and certain tokens give finite values, and NaN propagates."""
    kernel_fn = kernel.divergences_cpu if backend == "fast" else kernel.divergences_reference
    rows, terms = extreme_rows(slice(None, None, 2)), KLTerms(MIXTURES[name], PLAIN, PLAIN, 40, None)
    for teacher in rows:
        targets = teacher.expand(6, 40).contiguous()
        check_extreme(lambda student, targets=targets: kernel_fn(student, targets, terms, True), rows, teacher)


# Fused head and divergence


@pytest.mark.usefixtures("chunks_of_four")
@pairwise(ids=[(30, 30), (30, 41), (41, 30)], name=MIXTURES.keys(), truth=[0.0, 0.3], trained=[True, False])
def test_chunks_equal_definition(ids: tuple[int, int], name: str, truth: float, trained: bool) -> None:
    torch.manual_seed(1)
    mixture = KLMixture(**{**vars(MIXTURES[name]), "ce_weight": truth})
    student, teacher = make_head(10, ids[0], CAPPED, trained), make_head(7, ids[1], (1.3, None), False)
    hidden, seen, rows = torch.randn(13, 10, requires_grad=True), torch.randn(13, 7), torch.tensor([0, 2, 3, 5, 8, 12])
    targets = torch.randint(0, 30, (13,))
    loss, stats = linear_kl_divergence(hidden, targets, student, FullTargets(seen, teacher), mixture, rows)
    raw, other = hidden[rows].double() @ student.weight.double().T, seen[rows].double() @ teacher.weight.double().T
    p, q = (probabilities(x[:, :30], f, mixture.temperature) for x, f in ((raw, CAPPED), (other, (1.3, None))))
    divergence = kl_definition(p, q, mixture).sum()
    cross_entropy_loss = F.nll_loss(probabilities(raw, CAPPED, 1.0).log(), targets[rows], reduction="sum")
    expected = (1 - truth) * divergence + truth * cross_entropy_loss
    assert relative_error(loss.double(), expected) < 1e-6
    entropies = [torch.special.entr(x).sum() for x in (p, q)]
    expected_stats = torch.stack(
        [
            divergence,
            cross_entropy_loss,
            kl_definition(p, q, KLMixture()).sum(),
            *entropies,
            (p.argmax(-1) == q.argmax(-1)).sum(),
        ]
    )
    assert len(expected_stats) == len(METRICS) and relative_error(stats.double(), expected_stats) < 1e-6
    leaves = [hidden, *([student.weight] if trained else [])]
    pairs = zip(torch.autograd.grad(2 * loss, leaves), torch.autograd.grad(2 * expected, leaves), strict=True)
    assert all(relative_error(a, b) < 2e-6 for a, b in pairs)
    with torch.no_grad():
        assert torch.equal(
            linear_kl_divergence(hidden, targets, student, FullTargets(seen, teacher), mixture, rows)[0], loss
        )


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_divergences_equal_trl(beta: float, temperature: float) -> None:
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    stable = pytest.importorskip("trl.trainer.distillation_trainer")
    torch.manual_seed(2)
    student, teacher = make_head(10, 33), make_head(7, 33, trained=False)
    hidden, seen = torch.randn(2, 9, 10).div(2).requires_grad_(), torch.randn(2, 9, 7) / 2
    targets = torch.randint(0, 33, (2, 9))
    targets[0, :4] = -100
    mixture = KLMixture(beta, beta % 1, 1 - beta, (1 - beta) % 1, temperature)
    mixture = {0.0: KLMixture(temperature=temperature), 1.0: KLMixture(0, 0, 1, 0, temperature)}.get(beta, mixture)
    rows = (targets.flatten() >= 0).nonzero().squeeze(1)
    loss, _ = linear_kl_divergence(
        hidden.flatten(0, 1), targets.flatten(), student, FullTargets(seen.flatten(0, 1), teacher), mixture, rows
    )
    student_hidden, teacher_hidden = hidden.double(), seen.double()
    heads = student.weight.double(), teacher.weight.double()
    gkd_loss, logits = trl.GKDTrainer.generalized_jsd_loss, (student_hidden @ heads[0].T, teacher_hidden @ heads[1].T)
    gkd = gkd_loss(*logits, targets, beta, temperature, "sum")
    chunked, _, _ = stable._chunked_divergence_loss(
        student_hidden, teacher_hidden, *heads, targets >= 0, beta, 1, temperature=temperature
    )
    trained = [hidden, student.weight]
    grads = torch.autograd.grad(loss, trained)
    for expected in (gkd, chunked):
        assert relative_error(loss.double(), expected) < 3e-6
        errors = [relative_error(a, b) for a, b in zip(grads, torch.autograd.grad(expected, trained), strict=True)]
        assert max(errors) < 3e-6, errors


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("truth", [0.0, 0.5])
def test_full_logits_are_never_created(truth: float) -> None:
    student, teacher = make_head(4, 300, trained=False), make_head(4, 300, trained=False)
    hidden = torch.randn(200, 4, requires_grad=True)
    with LargestTensor() as largest:
        linear_kl_divergence(
            hidden,
            torch.ones(200).long(),
            student,
            FullTargets(torch.randn(200, 4), teacher),
            KLMixture(ce_weight=truth),
        )
        top_k_targets(hidden.detach(), teacher, torch.arange(200), 5, 1.0, 300)
    assert largest.numel <= 300 * 4, "chunks have four tokens"


class MatmulRows(TorchDispatchMode):
    """Number of rows of each matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.rows.add(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_matmuls_have_a_limited_number_of_shapes() -> None:
    """CPU libraries cache a kernel per shape: a new number of tokens in each step would fill the memory."""
    student, teacher = make_head(4, 30, trained=False), make_head(4, 30, trained=False)
    hidden, seen = torch.randn(99, 4, requires_grad=True), torch.randn(99, 4)
    with MatmulRows() as shapes:
        for count in (1, 13, 50, 63, 64, 65, 99):
            rows = torch.arange(count)
            linear_kl_divergence(hidden, torch.ones(99).long(), student, FullTargets(seen, teacher), KLMixture(), rows)
            top_k_targets(seen, teacher, rows, 5, 1.0, 30)
    assert shapes.rows == {64, 128}


# Top-k targets


@pytest.mark.usefixtures("chunks_of_four")
@pairwise(
    indirect=["backend"],
    backend=("fast", "reference"),
    finish=[PLAIN, (0.7, None), CAPPED],
    count=[1, 5, 29],
    name=MIXTURES.keys(),
    truth=[0.0, 0.4],
)
def test_top_k_equals_definition(
    finish: tuple[float, float | None], count: int, name: str, truth: float, backend: str
) -> None:
    torch.manual_seed(3)
    mixture = KLMixture(**{**vars(MIXTURES[name]), "ce_weight": truth})
    student, teacher = make_head(10, 30, finish), make_head(7, 36, finish, False)
    hidden, seen, targets = torch.randn(9, 10, requires_grad=True), torch.randn(9, 7), torch.randint(0, 30, (9,))
    top = top_k_targets(seen, teacher, torch.arange(9), count, mixture.temperature, 30)
    loss, stats = linear_kl_divergence(hidden, targets, student, top, mixture)
    raw = hidden.double() @ student.weight.double().T
    q = probabilities(seen.double() @ teacher.weight.double().T[:, :30], finish, mixture.temperature)
    ids = q.topk(count, dim=-1).indices
    assert torch.equal(top.ids.long(), ids)

    p = probabilities(raw, finish, mixture.temperature)
    top_k_probabilities = top_k_with_rest(p, ids), top_k_with_rest(q, ids)
    divergence = kl_definition(*top_k_probabilities, mixture).sum()
    cross_entropy_loss = F.nll_loss(probabilities(raw, finish, 1.0).log(), targets, reduction="sum")
    expected = (1 - truth) * divergence + truth * cross_entropy_loss
    assert relative_error(loss.double(), expected) < 1e-6
    entropies = [torch.special.entr(p).sum(), torch.special.entr(top_k_probabilities[1]).sum()]
    num_equal = (p.argmax(-1) == q.argmax(-1)).sum()
    expected_stats = torch.stack(
        [divergence, cross_entropy_loss, kl_definition(*top_k_probabilities, KLMixture()).sum(), *entropies, num_equal]
    )
    assert relative_error(stats.double(), expected_stats) < 1e-6
    trained = [hidden, student.weight]
    pairs = zip(torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained), strict=True)
    assert all(relative_error(a, b) < 3e-6 for a, b in pairs)


@pairwise(
    indirect=["backend"],
    backend=("fast", "reference"),
    sizes=[(19, 16, 3), (16, 16, 16), (5000, 4999, 64)],
    name=MIXTURES.keys(),
    dtype=[FP32, BF16],
)
def test_top_k_in_place_gradients(sizes: tuple[int, int, int], name: str, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(sum(sizes))
    (vocab, count, k), mixture = sizes, MIXTURES[name]
    kernel_fn, expected = (
        (kernel.top_k_divergences_cpu, kernel.top_k_log_probs_cpu)
        if backend == "fast"
        else (kernel.top_k_divergences_reference, kernel.top_k_log_probs_reference)
    )
    student, teacher = (3 * torch.randn(6, vocab)).to(dtype), (3 * torch.randn(6, count)).to(dtype)
    raw, finish = student.double().requires_grad_(), (0.7, None)
    ids = teacher.float().topk(k, dim=-1).indices.int()
    logs = expected(teacher.clone(), ids, PLAIN, mixture.temperature)
    q = top_k_with_rest(probabilities(teacher, PLAIN, mixture.temperature), ids.long())
    torch.testing.assert_close(logs.double().exp(), q, rtol=3e-6, atol=1e-8)
    probs = probabilities(raw[:, :count], finish, mixture.temperature)
    p = top_k_with_rest(probs, ids.long())
    divergence = kl_definition(p, q, mixture)
    (expected_grad,) = torch.autograd.grad(divergence.sum(), raw)
    expected_stats = [
        divergence,
        kl_definition(p, q, KLMixture()),
        torch.special.entr(probs).sum(-1),
        torch.special.entr(q).sum(-1),
    ]
    terms = KLTerms(mixture, finish, PLAIN, count, None)
    check_in_place(
        lambda x, gradient: kernel_fn(x, ids, logs, terms, gradient), student, count, expected_stats, expected_grad
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_top_k_with_extreme_and_impossible_logits(name: str, backend: str) -> None:
    """The remaining probability may underflow to zero, and still has a finite gradient."""
    kernel_fn = kernel.top_k_divergences_cpu if backend == "fast" else kernel.top_k_divergences_reference
    rows, terms = extreme_rows(slice(4, None)), KLTerms(MIXTURES[name], PLAIN, PLAIN, 40, None)
    for teacher in rows:
        ids = teacher.topk(4).indices.int().expand(6, 4).contiguous()
        logs = kernel.top_k_log_probs_reference(
            teacher[None].clone(), ids[:1], PLAIN, MIXTURES[name].temperature
        ).expand(6, 5)
        check_extreme(lambda student, top=(ids, logs): kernel_fn(student, *top, terms, True), rows, teacher)


@pytest.mark.parametrize("name", MIXTURES)
def test_top_k_of_all_tokens_equals_full_logits(name: str, backend: str) -> None:
    """Then nothing else remains, and the results are those of full logits."""
    torch.manual_seed(4)
    student, teacher, mixture = make_head(10, 30), make_head(7, 30, trained=False), MIXTURES[name]
    hidden, seen, targets = torch.randn(9, 10, requires_grad=True), torch.randn(9, 7), torch.randint(0, 30, (9,))
    top = top_k_targets(seen, teacher, torch.arange(9), 30, mixture.temperature, 30)
    assert (top.log_probs[:, -1] == -torch.inf).all()
    actual, expected = (
        linear_kl_divergence(hidden, targets, student, teacher_targets, mixture)
        for teacher_targets in (top, FullTargets(seen, teacher))
    )
    assert relative_error(actual[0], expected[0]) < 1e-6 and relative_error(actual[1], expected[1]) < 1e-6
    trained = [hidden, student.weight]
    pairs = zip(
        *(torch.autograd.grad(teacher_targets[0], trained) for teacher_targets in (actual, expected)), strict=True
    )
    assert all(relative_error(a, b) < 2e-6 for a, b in pairs)


def test_no_targets_give_zero() -> None:
    student, teacher = make_head(10, 30), make_head(7, 30, trained=False)
    hidden, no_rows = torch.randn(9, 10, requires_grad=True), torch.arange(0)
    top = top_k_targets(torch.randn(9, 7), teacher, no_rows, 5, 1.0, 30)
    assert isinstance(top, TopKTargets) and top.ids.shape == (0, 5)
    for teacher_targets in (
        FullTargets(torch.randn(9, 7), teacher),
        TopKTargets(top.ids.new_zeros(9, 5), top.log_probs.new_zeros(9, 6), torch.arange(9), 30),
    ):
        loss, figures = linear_kl_divergence(
            hidden, torch.zeros(9).long(), student, teacher_targets, KLMixture(), no_rows
        )
        loss.backward()
        assert hidden.grad is not None
        assert loss == 0 and not figures.any() and not hidden.grad.any()
