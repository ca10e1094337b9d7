"""Divergences in chunks against their definitions on all logits, in float64, and against TRL: values and gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints import error
from tunekit.kernels import cross_entropy
from tunekit.kernels import kl_divergence as kernel
from tunekit.kernels.kl_divergence import (
    FIGURES,
    FullTargets,
    KLMixture,
    KLTerms,
    TopKTargets,
    linear_kl_divergence,
    top_k_targets,
)
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

KERNEL = kernel
FP32, BF16 = torch.float32, torch.bfloat16
PLAIN, CAPPED = (1.0, None), (0.7, 5.0)
KINDS = {
    "forward": KLMixture(),
    "reverse": KLMixture(0.0, reverse=1.0),
    "both": KLMixture(1.0, reverse=1.0),
    "skewed": KLMixture(forward_skew=0.1),
    "skewed reverse": KLMixture(0.0, reverse=1.0, reverse_skew=0.1),
    "between": KLMixture(0.3, 0.3, 0.7, 0.7),
    "warm": KLMixture(temperature=2.5),
    "between, warm": KLMixture(0.5, 0.5, 0.5, 0.5, temperature=1.7),
}


def defined(p: Tensor, q: Tensor, by: KLMixture) -> Tensor:
    """Of distributions (n, ids), token by token."""
    m = by.forward_skew * q + (1 - by.forward_skew) * p
    n = by.reverse_skew * p + (1 - by.reverse_skew) * q
    forward, reverse = torch.xlogy(q, q) - torch.xlogy(q, m), torch.xlogy(p, p) - torch.xlogy(p, n)
    return (by.forward * forward + by.reverse * reverse).sum(-1)


def probabilities(raw: Tensor, finish: tuple[float, float | None], temperature: float) -> Tensor:
    x = raw.double() * finish[0]
    return ((x if finish[1] is None else finish[1] * (x / finish[1]).tanh()) / temperature).softmax(-1)


def few_of(x: Tensor, ids: Tensor) -> Tensor:
    """Probabilities (n, ids) of some ids, and of all others together."""
    return torch.cat([x.gather(1, ids), x.scatter(1, ids, 0.0).sum(-1, keepdim=True)], dim=1)


def check_in_place(
    work: Callable[[Tensor, bool], Tensor], student: Tensor, count: int, figures: list[Tensor], wanted: Tensor
) -> None:
    """Figures of a student's logits, and gradients in place of the first `count` of them; without, the logits stay."""
    kept = student.clone()
    quiet = work(student, False)
    assert torch.equal(student, kept), "without gradients the logits stay"
    found = work(student, True)
    assert torch.equal(found, quiet)
    torch.testing.assert_close(found[:, : len(figures)].double(), torch.stack(figures, 1), rtol=3e-6, atol=3e-6)
    assert not student[:, count:].any()
    limit = 2e-6 if student.dtype == FP32 else 4e-3
    torch.testing.assert_close(student.double(), wanted, rtol=limit, atol=limit)


def far_rows(never: slice) -> Tensor:
    """Logits (6, 40): usual ones, far from 0, far apart, sure of one, some that can not be, and all alike."""
    torch.manual_seed(0)
    near = torch.randn(40)
    sure = torch.full((40,), -60.0).index_fill(0, torch.tensor(3), 60.0)
    some = near.clone()
    some[never] = -torch.inf
    return torch.stack([near, near + 1e4, 1e3 * near, sure, some, torch.zeros(40)])


def check_far(work: Callable[[Tensor], Tensor], rows: Tensor, teacher: Tensor) -> None:
    """Each of some rows beside one that teaches: numbers, none where both are the same; what is no number stays so."""
    student = rows.clone()
    found = work(student)
    assert found.isfinite().all() and student.isfinite().all() and (found > -1e-5).all()
    same = (rows == teacher).all(-1)
    assert found[same, :2].abs().max() < 1e-5 and student[same].abs().max() < 1e-5
    student = rows.clone()
    student[2, 7] = torch.nan
    assert work(student)[2, 0].isnan() and student[2].isnan().any()


def head_of(dim: int, vocab: int, finish: tuple[float, float | None] = PLAIN, trained: bool = True) -> Head:
    head = Head(DecoderSpec(vocab, dim, (), logit_scale=finish[0], logit_softcap=finish[1]))
    head.weight.data.normal_(std=2 * dim**-0.5)
    return head.requires_grad_(trained)


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "ROOM", {"cpu": 1})


# A chunk's logits


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP32, BF16), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("sizes", [(1, 1), (19, 16), (16, 16), (5000, 4999)], ids=str)
def test_figures_and_gradients_in_place(
    sizes: tuple[int, int], name: str, dtypes: tuple[torch.dtype, torch.dtype], way: str
) -> None:
    torch.manual_seed(sum(sizes))
    (vocab, count), by = sizes, KINDS[name]
    work = kernel.fast_divergences if way == "fast" else kernel.torch_divergences
    for finish in (PLAIN, CAPPED):
        student, teacher = (3 * torch.randn(6, vocab)).to(dtypes[0]), (3 * torch.randn(6, count)).to(dtypes[1])
        raw = student.double().requires_grad_()
        p, q = probabilities(raw[:, :count], finish, by.temperature), probabilities(teacher, PLAIN, by.temperature)
        far = defined(p, q, by)
        (wanted,) = torch.autograd.grad(far.sum(), raw)
        figures = [far, defined(p, q, KLMixture()), torch.special.entr(p).sum(-1), torch.special.entr(q).sum(-1)]
        figures += [(p.argmax(-1) == q.argmax(-1)).double()] if FP32 == dtypes[0] == dtypes[1] else []
        terms = KLTerms(by, finish, PLAIN, count, None)
        check_in_place(lambda x, gradient, of=(teacher, terms): work(x, *of, gradient), student, count, figures, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_far_and_impossible_logits(name: str, way: str) -> None:
    """What cannot be, and what is sure, are numbers; what is no number stays so."""
    work = kernel.fast_divergences if way == "fast" else kernel.torch_divergences
    rows, terms = far_rows(slice(None, None, 2)), KLTerms(KINDS[name], PLAIN, PLAIN, 40, None)
    for teacher in rows:
        whole = teacher.expand(6, 40).contiguous()
        check_far(lambda student, whole=whole: work(student, whole, terms, True), rows, teacher)


# In chunks


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("truth", [0.0, 0.3])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ids", [(30, 30), (30, 41), (41, 30)], ids=str)
def test_chunks_are_the_definition(ids: tuple[int, int], name: str, truth: float, trained: bool) -> None:
    torch.manual_seed(1)
    by = KLMixture(**{**vars(KINDS[name]), "truth": truth})
    student, teacher = head_of(10, ids[0], CAPPED, trained), head_of(7, ids[1], (1.3, None), False)
    hidden, seen, rows = torch.randn(13, 10, requires_grad=True), torch.randn(13, 7), torch.tensor([0, 2, 3, 5, 8, 12])
    targets = torch.randint(0, 30, (13,))
    loss, figures = linear_kl_divergence(hidden, targets, student, FullTargets(seen, teacher), by, rows)
    raw, other = hidden[rows].double() @ student.weight.double().T, seen[rows].double() @ teacher.weight.double().T
    p, q = (probabilities(x[:, :30], f, by.temperature) for x, f in ((raw, CAPPED), (other, (1.3, None))))
    far = defined(p, q, by).sum()
    truly = F.nll_loss(probabilities(raw, CAPPED, 1.0).log(), targets[rows], reduction="sum")
    wanted = (1 - truth) * far + truth * truly
    assert error(loss.double(), wanted) < 1e-6
    entropies = [torch.special.entr(x).sum() for x in (p, q)]
    told = torch.stack([far, truly, defined(p, q, KLMixture()).sum(), *entropies, (p.argmax(-1) == q.argmax(-1)).sum()])
    assert len(told) == len(FIGURES) and error(figures.double(), told) < 1e-6
    learnt = [hidden, *([student.weight] if trained else [])]
    pairs = zip(torch.autograd.grad(2 * loss, learnt), torch.autograd.grad(2 * wanted, learnt), strict=True)
    assert all(error(a, b) < 2e-6 for a, b in pairs)
    with torch.no_grad():
        assert torch.equal(
            linear_kl_divergence(hidden, targets, student, FullTargets(seen, teacher), by, rows)[0], loss
        )


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_as_trl_has_it(beta: float, temperature: float) -> None:
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    stable = pytest.importorskip("trl.trainer.distillation_trainer")
    torch.manual_seed(2)
    student, teacher = head_of(10, 33), head_of(7, 33, trained=False)
    hidden, seen = torch.randn(2, 9, 10).div(2).requires_grad_(), torch.randn(2, 9, 7) / 2
    targets = torch.randint(0, 33, (2, 9))
    targets[0, :4] = -100
    by = KLMixture(beta, beta % 1, 1 - beta, (1 - beta) % 1, temperature)
    by = {0.0: KLMixture(temperature=temperature), 1.0: KLMixture(0, 0, 1, 0, temperature)}.get(beta, by)
    rows = (targets.flatten() >= 0).nonzero().squeeze(1)
    found, _ = linear_kl_divergence(
        hidden.flatten(0, 1), targets.flatten(), student, FullTargets(seen.flatten(0, 1), teacher), by, rows
    )
    own, other = hidden.double(), seen.double()
    heads = student.weight.double(), teacher.weight.double()
    of, logits = trl.GKDTrainer.generalized_jsd_loss, (own @ heads[0].T, other @ heads[1].T)
    gkd = of(*logits, targets, beta, temperature, "sum")
    chunked, _, _ = stable._chunked_divergence_loss(own, other, *heads, targets >= 0, beta, 1, temperature=temperature)
    learnt = [hidden, student.weight]
    mine = torch.autograd.grad(found, learnt)
    for wanted in (gkd, chunked):
        assert error(found.double(), wanted) < 1e-6
        apart = [error(a, b) for a, b in zip(mine, torch.autograd.grad(wanted, learnt), strict=True)]
        assert max(apart) < 1e-6, apart


class Largest(TorchDispatchMode):
    """The most numbers that any tensor has which an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.numel())
        return out


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("truth", [0.0, 0.5])
def test_logits_are_never_whole(truth: float) -> None:
    student, teacher = head_of(4, 300, trained=False), head_of(4, 300, trained=False)
    hidden = torch.randn(200, 4, requires_grad=True)
    with Largest() as seen:
        linear_kl_divergence(
            hidden, torch.ones(200).long(), student, FullTargets(torch.randn(200, 4), teacher), KLMixture(truth=truth)
        )
        top_k_targets(hidden.detach(), teacher, torch.arange(200), 5, 1.0, 300)
    assert seen.most <= 300 * 4, "a chunk is of four tokens"


class Shapes(TorchDispatchMode):
    """How many rows each product has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.rows.add(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_products_have_few_shapes() -> None:
    """Of each other one a CPU's library keeps a kernel: steps of ever new numbers of tokens would fill the memory."""
    student, teacher = head_of(4, 30, trained=False), head_of(4, 30, trained=False)
    hidden, seen = torch.randn(99, 4, requires_grad=True), torch.randn(99, 4)
    with Shapes() as shapes:
        for count in (1, 13, 50, 63, 64, 65, 99):
            rows = torch.arange(count)
            linear_kl_divergence(hidden, torch.ones(99).long(), student, FullTargets(seen, teacher), KLMixture(), rows)
            top_k_targets(seen, teacher, rows, 5, 1.0, 30)
    assert shapes.rows == {64, 128}


# The likeliest tokens alone


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("truth", [0.0, 0.4])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [1, 5, 29])
@pytest.mark.parametrize("finish", [PLAIN, (0.7, None), CAPPED], ids=str)
def test_the_likeliest_and_all_others_as_one(
    finish: tuple[float, float | None], count: int, name: str, truth: float, way: str
) -> None:
    torch.manual_seed(3)
    by = KLMixture(**{**vars(KINDS[name]), "truth": truth})
    student, teacher = head_of(10, 30, finish), head_of(7, 36, finish, False)
    hidden, seen, targets = torch.randn(9, 10, requires_grad=True), torch.randn(9, 7), torch.randint(0, 30, (9,))
    top = top_k_targets(seen, teacher, torch.arange(9), count, by.temperature, 30)
    loss, figures = linear_kl_divergence(hidden, targets, student, top, by)
    raw = hidden.double() @ student.weight.double().T
    q = probabilities(seen.double() @ teacher.weight.double().T[:, :30], finish, by.temperature)
    ids = q.topk(count, dim=-1).indices
    assert torch.equal(top.ids.long(), ids)

    p = probabilities(raw, finish, by.temperature)
    few = few_of(p, ids), few_of(q, ids)
    far = defined(*few, by).sum()
    truly = F.nll_loss(probabilities(raw, finish, 1.0).log(), targets, reduction="sum")
    wanted = (1 - truth) * far + truth * truly
    assert error(loss.double(), wanted) < 1e-6
    entropies = [torch.special.entr(p).sum(), torch.special.entr(few[1]).sum()]
    same = (p.argmax(-1) == q.argmax(-1)).sum()
    told = torch.stack([far, truly, defined(*few, KLMixture()).sum(), *entropies, same])
    assert error(figures.double(), told) < 1e-6
    learnt = [hidden, student.weight]
    pairs = zip(torch.autograd.grad(loss, learnt), torch.autograd.grad(wanted, learnt), strict=True)
    assert all(error(a, b) < 3e-6 for a, b in pairs)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("sizes", [(19, 16, 3), (16, 16, 16), (5000, 4999, 64)], ids=str)
def test_gradients_in_place_by_the_likeliest(
    sizes: tuple[int, int, int], name: str, dtype: torch.dtype, way: str
) -> None:
    torch.manual_seed(sum(sizes))
    (vocab, count, some), by = sizes, KINDS[name]
    work, expected = (
        (kernel.fast_top, kernel.fast_expected) if way == "fast" else (kernel.torch_top, kernel.torch_expected)
    )
    student, teacher = (3 * torch.randn(6, vocab)).to(dtype), (3 * torch.randn(6, count)).to(dtype)
    raw, finish = student.double().requires_grad_(), (0.7, None)
    ids = teacher.float().topk(some, dim=-1).indices.int()
    logs = expected(teacher.clone(), ids, PLAIN, by.temperature)
    q = few_of(probabilities(teacher, PLAIN, by.temperature), ids.long())
    torch.testing.assert_close(logs.double().exp(), q, rtol=3e-6, atol=1e-8)
    whole = probabilities(raw[:, :count], finish, by.temperature)
    p = few_of(whole, ids.long())
    far = defined(p, q, by)
    (wanted,) = torch.autograd.grad(far.sum(), raw)
    figures = [far, defined(p, q, KLMixture()), torch.special.entr(whole).sum(-1), torch.special.entr(q).sum(-1)]
    terms = KLTerms(by, finish, PLAIN, count, None)
    check_in_place(lambda x, gradient: work(x, ids, logs, terms, gradient), student, count, figures, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_far_and_impossible_logits_by_the_likeliest(name: str, way: str) -> None:
    """What is left may be so unlikely that no exponential shows it, and still has a gradient that is a number."""
    work = kernel.fast_top if way == "fast" else kernel.torch_top
    rows, terms = far_rows(slice(4, None)), KLTerms(KINDS[name], PLAIN, PLAIN, 40, None)
    for teacher in rows:
        ids = teacher.topk(4).indices.int().expand(6, 4).contiguous()
        logs = kernel.torch_expected(teacher[None].clone(), ids[:1], PLAIN, KINDS[name].temperature).expand(6, 5)
        check_far(lambda student, top=(ids, logs): work(student, *top, terms, True), rows, teacher)


@pytest.mark.parametrize("name", KINDS)
def test_all_tokens_are_the_likeliest(name: str, way: str) -> None:
    """Then nothing else is left, and the numbers are those of all logits."""
    torch.manual_seed(4)
    student, teacher, by = head_of(10, 30), head_of(7, 30, trained=False), KINDS[name]
    hidden, seen, targets = torch.randn(9, 10, requires_grad=True), torch.randn(9, 7), torch.randint(0, 30, (9,))
    top = top_k_targets(seen, teacher, torch.arange(9), 30, by.temperature, 30)
    assert (top.logs[:, -1] == -torch.inf).all()
    found, wanted = (
        linear_kl_divergence(hidden, targets, student, one, by) for one in (top, FullTargets(seen, teacher))
    )
    assert error(found[0], wanted[0]) < 1e-6 and error(found[1], wanted[1]) < 1e-6
    learnt = [hidden, student.weight]
    pairs = zip(*(torch.autograd.grad(one[0], learnt) for one in (found, wanted)), strict=True)
    assert all(error(a, b) < 2e-6 for a, b in pairs)


def test_no_token_is_learnt() -> None:
    student, teacher = head_of(10, 30), head_of(7, 30, trained=False)
    hidden, none = torch.randn(9, 10, requires_grad=True), torch.arange(0)
    top = top_k_targets(torch.randn(9, 7), teacher, none, 5, 1.0, 30)
    assert isinstance(top, TopKTargets) and top.ids.shape == (0, 5)
    for one in (
        FullTargets(torch.randn(9, 7), teacher),
        TopKTargets(top.ids.new_zeros(9, 5), top.logs.new_zeros(9, 6), torch.arange(9), 30),
    ):
        loss, figures = linear_kl_divergence(hidden, torch.zeros(9).long(), student, one, KLMixture(), none)
        loss.backward()
        assert hidden.grad is not None
        assert loss == 0 and not figures.any() and not hidden.grad.any()
