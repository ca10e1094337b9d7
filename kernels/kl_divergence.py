"""How far what a student expects is from what a teacher expects, a chunk of tokens at a time.

Logits of neither exist as a whole. As in cross_entropy.py, whose chunks these are, gradients are taken while the logits
are at hand, and written over those of the student.
"""

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import cross_entropy, fake_mode
from tunekit.kernels.cpp_extension import load_library
from tunekit.kernels.cross_entropy import (
    NATIVE,
    AutogradHeadChunks,
    ChunkedSum,
    LinearHeadChunks,
    LMHead,
    TokenChunks,
    VocabShard,
    default_terms,
    prepare_chunks,
)
from tunekit.kernels.torch_compile import disable_compile
from tunekit.kernels.triton_support import uses_triton

SOURCE = Path(__file__).with_name("divergence.cpp")
MIN_LOG_PROB = -1e4  # of a logarithm: what cannot be is very unlikely, and no sum becomes a NaN by it
MIN_PROB = 1e-37
ROW_CHUNK = 64  # whose logits are made fp32 at a time
# What is told of a chunk, summed over its tokens; all but the second at the temperature of the comparison.
METRICS = ("divergence", "cross_entropy", "kl", "entropy", "teacher_entropy", "top1_agreement")


@dataclass(frozen=True)
class KLMixture:
    """forward KL(q || s q + (1 - s) p) + reverse KL(p || t p + (1 - t) q), of a student's p and a teacher's q.

    Both are of logits over a temperature, and of the ids that both embed. `truth` is the share that the cross-entropy
    of the tokens which follow has in the loss.
    """

    forward: float = 1.0
    forward_skew: float = 0.0
    reverse: float = 0.0
    reverse_skew: float = 0.0
    temperature: float = 1.0
    ce_weight: float = 0.0


@dataclass(frozen=True)
class KLTerms:
    """A mixture, what is done to the logits of both first, and which of them both have."""

    mixture: KLMixture
    student: tuple[float, float | None]  # scale and softcap
    teacher: tuple[float, float | None]
    count: int  # of the student's ids that are here, and that the teacher has too
    vocab_shard: VocabShard | None

    @property
    def weight(self) -> float:
        return 1 - self.mixture.ce_weight

    @property
    def to_list(self) -> list[float]:
        by = self.mixture
        parts = by.forward, by.forward_skew, by.reverse, by.reverse_skew, self.weight
        return [*(number or 0.0 for number in (*self.student, *self.teacher)), by.temperature, *parts]


class TeacherTargets(Protocol):
    """What a teacher expects on each of N rows."""

    def divergences(self, logits: Tensor, rows: Tensor, by: KLMixture, head: LMHead, gradient: bool) -> Tensor:
        """(n, 5) of a student's raw logits (n, vocab) on some rows: the figures but the cross-entropy.

        With `gradient`, the logits become it.
        """
        ...


@disable_compile  # the number of learnt tokens differs from batch to batch, and each would compile anew
def linear_kl_divergence(
    hidden: Tensor, targets: Tensor, head: LMHead, teacher: TeacherTargets, mixture: KLMixture, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the loss over tokens, and of each of FIGURES: `hidden` (N, dim) of the student, `targets` (N,).

    Only `rows` count, if they are given. The heads may be anything: plain, adapted, scaled, shared by ranks.
    """
    step = KLChunkLoss(mixture, head, teacher, targets)
    loss = ChunkedSum.apply(*prepare_chunks(hidden, torch.arange(len(hidden), device=hidden.device), head, step, rows))
    return loss, sum(step.metrics, start=torch.zeros(len(METRICS), device=hidden.device))


@dataclass(frozen=True)
class KLChunkLoss:
    """A step of chunks, which is told the numbers of rows in place of targets."""

    mixture: KLMixture
    head: LMHead
    teacher: TeacherTargets
    targets: Tensor
    metrics: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        assert weights is None
        truth, rows = self.mixture.ce_weight, targets
        mixed = gradient and truth > 0
        own = logits.clone() if mixed else logits
        weights = torch.full_like(rows, truth, dtype=torch.float32)
        losses = default_terms(self.head)(own, self.targets.index_select(0, rows), weights, mixed)
        figures = self.teacher.divergences(logits, rows, self.mixture, self.head, gradient)
        if mixed:
            logits += own
        figures = torch.cat([figures[:, :1], losses[:, None], figures[:, 1:]], dim=1)
        self.metrics.append(figures.sum(0))
        return (1 - truth) * figures[:, 0] + truth * losses


# A teacher of whose logits all are made


class FullTargets:
    """Hidden states (N, dim) of a teacher, and its head."""

    def __init__(self, hidden: Tensor, head: LMHead) -> None:
        self.hidden, self.head = hidden, head
        self.layer: LinearHeadChunks | AutogradHeadChunks | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """Raw ones (n, ids), in memory that is used again for the next chunk."""
        x = F.pad(self.hidden.index_select(0, rows), (0, 0, 0, -len(rows) % cross_entropy.TOKEN_MULTIPLE))
        if self.layer is None or (isinstance(self.layer, LinearHeadChunks) and len(self.layer.buffer) < len(x)):
            self.layer = (LinearHeadChunks if self.head.is_plain_linear else AutogradHeadChunks)(self.head, x, len(x), [])
        return self.layer.logits(x, False)[: len(rows)]

    def divergences(self, logits: Tensor, rows: Tensor, by: KLMixture, head: LMHead, gradient: bool) -> Tensor:
        terms, made = make_terms(by, head, num_ids_of(self.head), self.head), self.logits(rows)
        if head.vocab_shard is not None and num_ids_of(head) != num_ids_of(self.head):  # ranks have other parts of the teacher's
            assert self.head.vocab_shard is not None
            made = self.head.vocab_shard.all_gather(made)[:, head.vocab_shard.start :]
        made = made[:, : terms.count]
        return choose_kernel(logits, made, head.vocab_shard)(logits, made, terms, gradient)


def num_ids_of(head: LMHead) -> int:
    """All ids that a head makes logits for."""
    return len(head.weight) if head.vocab_shard is None else head.vocab_shard.total


def make_terms(by: KLMixture, head: LMHead, ids: int, teacher: LMHead | None = None) -> KLTerms:
    """Of a student's head and a teacher who knows so many ids."""
    start = 0 if head.vocab_shard is None else head.vocab_shard.start
    count = max(0, min(len(head.weight), ids - start))
    finish = (1.0, None) if teacher is None else (teacher.scale, teacher.softcap)
    return KLTerms(by, (head.scale, head.softcap), finish, count, head.vocab_shard)


def scale_logits(raw: Tensor, finish: tuple[float, float | None], temperature: float) -> Tensor:
    """Logits (n, ids) as a product gave them, in fp32, scaled and capped, over the temperature."""
    scale, softcap = finish
    x = raw.float() * scale
    return (softcap * (x / softcap).tanh() if softcap else x) / temperature


def choose_kernel(student: Tensor, teacher: Tensor, share: VocabShard | None) -> Callable[..., Tensor]:
    """The fastest function that computes divergences of these logits. Ranks that share a vocabulary use plain torch."""
    if share is None and student.stride(1) == teacher.stride(1) == 1 and on_gpu(student):
        return divergences_gpu
    return divergences_cpu if share is None and is_supported(student, teacher) else divergences_reference


def divergences_reference(student: Tensor, teacher: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """Divergence, KL of teacher and student, both entropies, and whether both find the same likeliest, (n, 5)."""
    whole, student = student, student[:, : terms.count]
    x, y = (
        scale_logits(student, terms.student, terms.mixture.temperature),
        scale_logits(teacher, terms.teacher, terms.mixture.temperature),
    )
    most = max_over_vocab(x, terms.vocab_shard), max_over_vocab(y, terms.vocab_shard)
    both = ((x == most[0]) & (y == most[1])).any(-1)
    lp, lq = (log_softmax(z, one, terms.vocab_shard).clamp(min=MIN_LOG_PROB) for z, one in ((x, most[0]), (y, most[1])))
    p, q = lp.exp(), lq.exp()
    far, pull = divergence_terms(lp, lq, terms.mixture)
    parts = far, q * (lq - lp), -p * lp, -q * lq, both[:, None], pull
    sums = sum_over_ranks(torch.stack([part.sum(-1) for part in parts], dim=1), terms.vocab_shard)
    if gradient:
        whole[:, terms.count :] = 0
        student.copy_((pull - p * sums[:, 5:]) * logit_slope(x, terms))
    sums[:, 4].clamp_(max=1)
    return sums[:, :5]


def divergence_terms(lp: Tensor, lq: Tensor, by: KLMixture) -> tuple[Tensor, Tensor]:
    """What each id adds to the divergence, and the slope of that over p, times p."""
    p, q = lp.exp(), lq.exp()
    far, pull = torch.zeros_like(p), torch.zeros_like(p)
    if by.forward:
        s = by.forward_skew
        m = (s * q + (1 - s) * p).clamp(min=MIN_PROB)
        far += by.forward * q * (lq - (m.log() if s else lp))
        pull -= by.forward * (1 - s) * q * (p / m if s else 1)
    if by.reverse:
        t = by.reverse_skew
        n = (t * p + (1 - t) * q).clamp(min=MIN_PROB)
        own = p * (lp - (n.log() if t else lq))
        far += by.reverse * own
        pull += by.reverse * (own - t * p * (p / n))
    return far, pull


def logit_slope(x: Tensor, terms: KLTerms) -> Tensor | float:
    """Of a finished logit over what the product gave, times the weight of the divergence."""
    (scale, softcap), temperature = terms.student, terms.mixture.temperature
    by = terms.weight * scale / temperature
    return by * (1 - (x * temperature / softcap).square()) if softcap else by


def max_over_vocab(x: Tensor, share: VocabShard | None) -> Tensor:
    """(n, 1), over all ids."""
    most = x.amax(-1, keepdim=True) if x.shape[1] else x.new_full((len(x), 1), -torch.inf)
    return most if share is None else share.all_reduce_max(most)


def log_softmax(x: Tensor, most: Tensor, share: VocabShard | None) -> Tensor:
    """Of the ids that are here, where `most` (n, 1) is the largest of all."""
    x = x - most  # first: sums of what is far from zero are rough
    return x - sum_over_ranks(x.exp().sum(-1, keepdim=True), share).log()


def sum_over_ranks(x: Tensor, share: VocabShard | None) -> Tensor:
    return x if share is None else share.all_reduce_sum(x)


# The same, compiled


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        for one in NATIVE.values():
            for other in NATIVE.values():
                getattr(lib, f"{one}_{other}").argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int, ctypes.c_int]
            getattr(lib, f"top_{one}").argtypes = [*[ctypes.c_void_p] * 6, ctypes.c_int, ctypes.c_int]
            getattr(lib, f"expected_{one}").argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int]
    return lib


def is_supported(*logits: Tensor) -> bool:
    """Whether there is a compiled function for these."""
    fit = all(fake_mode.device_type(x) == "cpu" and x.dtype in NATIVE and x.stride(1) == 1 for x in logits)
    return fit and (fake_mode.is_fake() or compiled() is not None)


def divergences_cpu(student: Tensor, teacher: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """As `torch_divergences`, of logits on the CPU."""
    out = torch.empty(len(student), len(METRICS) - 1)
    if fake_mode.is_fake():
        return out
    numbers = (ctypes.c_float * 10)(*terms.to_list)
    sizes = (ctypes.c_int64 * 5)(len(student), terms.count, student.shape[1], student.stride(0), teacher.stride(0))
    work = getattr(compiled(), f"{NATIVE[student.dtype]}_{NATIVE[teacher.dtype]}")
    work(student.data_ptr(), teacher.data_ptr(), numbers, out.data_ptr(), sizes, gradient, torch.get_num_threads())
    return out


# The same on a GPU, in one launch and without temporary memory


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernel takes a tensor, or would take it on the GPU that a plan is for."""
    return fake_mode.device_type(x) == "cuda" if fake_mode.is_fake() else uses_triton(x)


def divergences_gpu(student: Tensor, teacher: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """As `torch_divergences`, of logits on a GPU."""
    if fake_mode.is_fake():
        return student.new_empty(len(student), len(METRICS) - 1, dtype=torch.float32)
    return gpu().divergences(student, teacher, terms.to_list, terms.count, gradient)


@cache
def gpu() -> ModuleType:
    """The Triton kernels, loaded only where there is a GPU."""
    return importlib.import_module("tunekit.kernels.kl_divergence_triton")


# A teacher of whose tokens the likeliest are known


@dataclass(frozen=True)
class TopKTargets:
    """A teacher's likeliest tokens: `ids` (N, k), and `logs` (N, k + 1) of what it expects of each, at a temperature.

    The last is of all other ids that both embed, which count as one. `at` says where a row's are.
    """

    ids: Tensor
    log_probs: Tensor
    index: Tensor
    num_ids: int  # ids that the teacher knows

    def divergences(self, logits: Tensor, rows: Tensor, by: KLMixture, head: LMHead, gradient: bool) -> Tensor:
        terms, at = make_terms(by, head, self.num_ids), self.index.index_select(0, rows)
        work = top_k_divergences_cpu if head.vocab_shard is None and head.softcap is None and is_supported(logits) else top_k_divergences_reference
        return work(logits, self.ids.index_select(0, at), self.log_probs.index_select(0, at), terms, gradient)


def top_k_divergences_reference(logits: Tensor, ids: Tensor, logs: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """As `torch_divergences`, of the likeliest ids and all others as one. Only the student's entropy is of all ids."""
    share, whole, logits = terms.vocab_shard, logits, logits[:, : terms.count]
    x = scale_logits(logits, terms.student, terms.mixture.temperature)
    at = ids.long() - (0 if share is None else share.start)
    here = (at >= 0) & (at < terms.count)
    at, most, caps = at.where(here, 0), max_over_vocab(x, share), logit_slope(x, terms) if gradient else 1.0
    x = log_softmax(x, most, share)
    likeliest = max_over_vocab(x, share)
    own = x.gather(1, at).where(here, 0) if terms.count else torch.zeros_like(logs[:, :-1])
    own = sum_over_ranks(own, share)
    entropy = -sum_over_ranks((x.exp() * x.clamp(min=MIN_LOG_PROB)).sum(-1, keepdim=True), share)
    columns, first, some = scatter_columns(at, here)
    if terms.count:
        x.scatter_(1, columns, x.gather(1, columns).masked_fill(some, -torch.inf))
    left = max_over_vocab(x, share).clamp(min=MIN_LOG_PROB)  # what is left may be so unlikely that its exponentials are zero
    rest = left + sum_over_ranks((x - left).exp().sum(-1, keepdim=True), share).log()
    lp, lq = torch.cat([own, rest], dim=1).clamp(min=MIN_LOG_PROB), logs.float().clamp(min=MIN_LOG_PROB)
    far, pull = divergence_terms(lp, lq, terms.mixture)
    if gradient:
        pull = pull - lp.exp() * pull.sum(-1, keepdim=True)
        x = (x - rest.clamp(min=MIN_LOG_PROB)).exp_().mul_(pull[:, -1:])
        if terms.count:
            own_pull = pull[:, :-1].where(here, pull.gather(1, first))
            x.scatter_(1, columns, own_pull.where(some, x.gather(1, columns)))
        whole[:, terms.count :] = 0
        logits.copy_(x * caps)
    same = own[:, :1] == likeliest
    parts = far.sum(-1), (lq.exp() * (lq - lp)).sum(-1), entropy.squeeze(1), -(lq.exp() * lq).sum(-1), same.squeeze(1)
    return torch.stack([part.float() for part in parts], dim=1)


def scatter_columns(at: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns (N, k) to write to, where `at` counts only if `here`; the others are the row's first one that counts.

    Also which that is (N, 1), and whether there is any (N, 1). A list of those that count would make the host wait.
    """
    first, some = here.int().argmax(1, keepdim=True), here.any(1, keepdim=True)
    return at.where(here, at.gather(1, first)), first, some


def top_k_divergences_cpu(logits: Tensor, ids: Tensor, logs: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """As `torch_top`, of logits on the CPU that are not capped."""
    out = torch.empty(len(logits), len(METRICS) - 1)
    if fake_mode.is_fake():
        return out
    numbers, ids, logs = (ctypes.c_float * 10)(*terms.to_list), to_int32_ids(ids, terms.count), logs.float().contiguous()
    sizes = (ctypes.c_int64 * 5)(len(logits), terms.count, logits.shape[1], logits.stride(0), ids.shape[1])
    work = getattr(compiled(), f"top_{NATIVE[logits.dtype]}")
    places = logits.data_ptr(), ids.data_ptr(), logs.data_ptr(), numbers, out.data_ptr()
    work(*places, sizes, gradient, torch.get_num_threads())
    return out


def to_int32_ids(ids: Tensor, count: int) -> Tensor:
    """Ids (n, k) as compiled functions read them."""
    assert not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < count
    return ids.int().contiguous()


@torch.no_grad()
def top_k_targets(hidden: Tensor, head: LMHead, rows: Tensor, count: int, temperature: float, ids: int) -> TopKTargets:
    """What `Top` holds of `rows` (n,) of hidden states (N, dim), for a student that embeds the first `ids` ids."""
    step = TopKChunks(head, count, temperature, ids)
    TokenChunks(head, step, rows, rows).run(hidden, [], False)
    found = torch.cat([hidden.new_zeros(0, count, dtype=torch.int32), *(ids for ids, _ in step.results)])
    logs = torch.cat([hidden.new_zeros(0, count + 1, dtype=torch.float32), *(logs for _, logs in step.results)])
    return TopKTargets(found, logs, index_in_rows(rows, len(hidden)), num_ids_of(head))


def index_in_rows(rows: Tensor, count: int) -> Tensor:
    """Which of `rows` (n,) each of so many is, (count,)."""
    return rows.new_zeros(count).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))


@dataclass(frozen=True)
class TopKChunks:
    """A step of chunks that keeps the likeliest ids."""

    head: LMHead
    top_k: int
    temperature: float
    num_ids: int
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        whole = logits if self.head.vocab_shard is None else self.head.vocab_shard.all_gather(logits)
        raw, finish = whole[:, : self.num_ids], (self.head.scale, self.head.softcap)
        ids = torch.cat([some.float().topk(self.top_k, dim=-1).indices.int() for some in raw.split(ROW_CHUNK)])
        work = top_k_log_probs_cpu if self.head.softcap is None and is_supported(raw) else top_k_log_probs_reference
        logs = work(raw, ids, finish, self.temperature)
        self.results.append((ids, logs))
        return logs.new_zeros(len(logs))


def top_k_log_probs_reference(raw: Tensor, ids: Tensor, finish: tuple[float, float | None], temperature: float) -> Tensor:
    """What is expected of `ids` (n, k) and of all others as one, (n, k + 1), by logits as a product gave them."""
    x, at = scale_logits(raw, finish, temperature), ids.long()
    x -= x.amax(-1, keepdim=True)  # first: sums of what is far from zero are rough
    normal = x.logsumexp(-1, keepdim=True)
    logs = x.gather(1, at) - normal
    return torch.cat([logs, x.scatter_(1, at, -torch.inf).logsumexp(-1, keepdim=True) - normal], dim=1)


def top_k_log_probs_cpu(raw: Tensor, ids: Tensor, finish: tuple[float, float | None], temperature: float) -> Tensor:
    """As `torch_expected`, of logits on the CPU that are not capped."""
    out = torch.empty(len(ids), ids.shape[1] + 1)
    if fake_mode.is_fake():
        return out
    terms = KLTerms(KLMixture(temperature=temperature), (1.0, None), finish, raw.shape[1], None)
    numbers, ids = (ctypes.c_float * 10)(*terms.to_list), to_int32_ids(ids, terms.count)
    sizes = (ctypes.c_int64 * 5)(len(raw), terms.count, raw.shape[1], raw.stride(0), ids.shape[1])
    work = getattr(compiled(), f"expected_{NATIVE[raw.dtype]}")
    work(raw.data_ptr(), ids.data_ptr(), out.data_ptr(), numbers, sizes, torch.get_num_threads())
    return out
