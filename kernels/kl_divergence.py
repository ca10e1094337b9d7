"""KL divergences between student and teacher distributions, fused with the heads, in chunks of tokens.

The full logits of neither model are materialized. As in cross_entropy.py, gradients are computed in the forward pass
and written over the logits of the student.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import cross_entropy, fake_mode
from tunekit.kernels.argument_checks import (
    check_contiguous_rows,
    check_dim,
    check_index_range,
    check_shape,
    check_tensor,
)
from tunekit.kernels.cpp_extension import DTYPES, load_library
from tunekit.kernels.cross_entropy import (
    AutogradHeadChunks,
    ChunkedSum,
    LinearHeadChunks,
    TokenChunks,
    default_terms,
    prepare_chunks,
    scale_logits,
)
from tunekit.kernels.lm_head import LMHead, VocabShard, max_over_vocab, sum_over_ranks
from tunekit.kernels.torch_compile import disable_compile
from tunekit.kernels.triton_support import triton_kernels, uses_triton

SOURCE = Path(__file__).with_name("divergence.cpp")
MIN_LOG_PROB = -1e4  # lower bound of log-probabilities, which avoids NaN from 0 * inf
MIN_PROB = 1e-37
ROW_CHUNK = 64  # rows of logits that are converted to fp32 at a time
# Metrics, summed over tokens. All but cross_entropy are computed at the temperature of the loss.
METRICS = ("divergence", "cross_entropy", "kl", "entropy", "teacher_entropy", "top1_agreement")


@dataclass(frozen=True)
class KLMixture:
    """Weights of (1 - ce_weight) divergence + ce_weight cross-entropy.

    divergence = forward KL(q || s q + (1 - s) p) + reverse KL(p || t p + (1 - t) q) for student p and teacher q, with
    s = forward_skew and t = reverse_skew. Both are softmax(logits / temperature) over the ids that both models embed.
    """

    forward: float = 1.0
    forward_skew: float = 0.0
    reverse: float = 0.0
    reverse_skew: float = 0.0
    temperature: float = 1.0
    ce_weight: float = 0.0


@dataclass(frozen=True)
class KLTerms:
    """Mixture, logit transforms of both models, and number of common ids."""

    mixture: KLMixture
    student: tuple[float, float | None]  # scale and softcap
    teacher: tuple[float, float | None]
    count: int  # local ids of the student that the teacher embeds too
    vocab_shard: VocabShard | None

    @property
    def weight(self) -> float:
        return 1 - self.mixture.ce_weight

    @property
    def values(self) -> list[float]:
        """Ten floats, as the kernels take them."""
        mixture = self.mixture
        weights = mixture.forward, mixture.forward_skew, mixture.reverse, mixture.reverse_skew, self.weight
        return [*(value or 0.0 for value in (*self.student, *self.teacher)), mixture.temperature, *weights]


class TeacherTargets(Protocol):
    """Teacher distribution of each of N tokens."""

    def divergences(self, logits: Tensor, rows: Tensor, mixture: KLMixture, head: LMHead, gradient: bool) -> Tensor:
        """METRICS except cross_entropy, (n, 5) fp32, for raw student logits (n, vocab) of the given rows (n,).

        With `gradient`, the gradient of the weighted divergence is written over the logits.
        """
        ...


@disable_compile  # the number of target tokens differs from batch to batch, and each would cause a recompilation
def linear_kl_divergence(
    hidden: Tensor,
    targets: Tensor,
    head: LMHead,
    teacher: TeacherTargets,
    mixture: KLMixture,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of the loss and of METRICS (6,) over tokens, for student states `hidden` (N, dim) and `targets` (N,).

    `rows` restricts the sums to these tokens. Heads may be quantized, adapted, scaled or vocabulary-parallel.
    """
    chunk_loss = KLChunkLoss(mixture, head, teacher, targets)
    loss = ChunkedSum.apply(
        None, *prepare_chunks(hidden, torch.arange(len(hidden), device=hidden.device), head, chunk_loss, rows)
    )
    return loss, sum(chunk_loss.metrics, start=torch.zeros(len(METRICS), device=hidden.device))


@dataclass(frozen=True)
class KLChunkLoss:
    """Loss of a chunk. Its `targets` argument contains row indices, from which it looks up targets and teacher."""

    mixture: KLMixture
    head: LMHead
    teacher: TeacherTargets
    targets: Tensor
    metrics: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        assert weights is None
        ce_weight, rows = self.mixture.ce_weight, targets
        needs_ce_gradient = gradient and ce_weight > 0
        ce_logits = logits.clone() if needs_ce_gradient else logits
        weights = torch.full_like(rows, ce_weight, dtype=torch.float32)
        losses = default_terms(self.head)(ce_logits, self.targets.index_select(0, rows), weights, needs_ce_gradient)
        metrics = self.teacher.divergences(logits, rows, self.mixture, self.head, gradient)
        if needs_ce_gradient:
            logits += ce_logits
        metrics = torch.cat([metrics[:, :1], losses[:, None], metrics[:, 1:]], dim=1)
        self.metrics.append(metrics.sum(0))
        return (1 - ce_weight) * metrics[:, 0] + ce_weight * losses


# Teacher with full logits


class FullTargets:
    """Full distribution of a teacher, from its hidden states (N, dim) and its head."""

    def __init__(self, hidden: Tensor, head: LMHead) -> None:
        self.hidden, self.head = hidden, head
        self.layer: LinearHeadChunks | AutogradHeadChunks | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """Raw logits (n, ids) of the teacher, in memory that the next chunk reuses."""
        x = F.pad(self.hidden.index_select(0, rows), (0, 0, 0, -len(rows) % cross_entropy.TOKEN_MULTIPLE))
        if self.layer is None or (isinstance(self.layer, LinearHeadChunks) and len(self.layer.buffer) < len(x)):
            self.layer = (LinearHeadChunks if self.head.is_plain_linear else AutogradHeadChunks)(
                self.head, x, len(x), []
            )
        return self.layer.logits(x, False)[: len(rows)]

    def divergences(self, logits: Tensor, rows: Tensor, mixture: KLMixture, head: LMHead, gradient: bool) -> Tensor:
        terms, teacher_logits = make_terms(mixture, head, num_ids_of(self.head), self.head), self.logits(rows)
        if head.vocab_shard is not None and num_ids_of(head) != num_ids_of(self.head):  # vocabulary shards differ
            assert self.head.vocab_shard is not None
            teacher_logits = self.head.vocab_shard.all_gather(teacher_logits)[:, head.vocab_shard.start :]
        teacher_logits = teacher_logits[:, : terms.count]
        return choose_kernel(logits, teacher_logits, head.vocab_shard)(logits, teacher_logits, terms, gradient)


def num_ids_of(head: LMHead) -> int:
    """Number of ids of a head, over all vocabulary shards."""
    return len(head.weight) if head.vocab_shard is None else head.vocab_shard.total


def make_terms(mixture: KLMixture, head: LMHead, num_teacher_ids: int, teacher: LMHead | None = None) -> KLTerms:
    """Terms for the head of a student, and a teacher with `num_teacher_ids` ids."""
    start = 0 if head.vocab_shard is None else head.vocab_shard.start
    count = max(0, min(len(head.weight), num_teacher_ids - start))
    teacher_transform = (1.0, None) if teacher is None else (teacher.scale, teacher.softcap)
    return KLTerms(mixture, (head.scale, head.softcap), teacher_transform, count, head.vocab_shard)


def choose_kernel(student: Tensor, teacher: Tensor, vocab_shard: VocabShard | None) -> Callable[..., Tensor]:
    """Fastest function that supports these logits. Vocabulary-parallel heads use the torch reference."""
    if vocab_shard is None and student.stride(1) == teacher.stride(1) == 1 and on_gpu(student):
        return divergences_gpu
    return divergences_cpu if vocab_shard is None and is_supported(student, teacher) else divergences_reference


def check_logits(student: Tensor, teacher: Tensor, count: int) -> None:
    """Raise ValueError unless student logits (n, vocab) and teacher logits (n, count) fit each other."""
    check_contiguous_rows("kl_divergence", "student logits", student)
    check_contiguous_rows("kl_divergence", "teacher logits", teacher)
    check_tensor("kl_divergence", "teacher logits", teacher, (len(student), count), teacher.dtype, student.device)
    if not 0 <= count <= student.shape[1]:
        raise ValueError(f"kl_divergence: student logits have {student.shape[1]} ids, expected at least {count}")


def divergences_reference(student: Tensor, teacher: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """Divergence, KL(q || p), entropies of student and teacher, and top-1 agreement, (n, 5) fp32."""
    all_logits, student = student, student[:, : terms.count]
    x = scale_logits(student, *terms.student) / terms.mixture.temperature
    y = scale_logits(teacher, *terms.teacher) / terms.mixture.temperature
    maxima = max_over_vocab(x, terms.vocab_shard), max_over_vocab(y, terms.vocab_shard)
    agreement = ((x == maxima[0]) & (y == maxima[1])).any(-1)
    lp, lq = (
        log_softmax(z, maximum, terms.vocab_shard).clamp(min=MIN_LOG_PROB)
        for z, maximum in ((x, maxima[0]), (y, maxima[1]))
    )
    p, q = lp.exp(), lq.exp()
    divergence, grad_log_probs = divergence_terms(lp, lq, terms.mixture)
    summands = divergence, q * (lq - lp), -p * lp, -q * lq, agreement[:, None], grad_log_probs
    sums = sum_over_ranks(torch.stack([summand.sum(-1) for summand in summands], dim=1), terms.vocab_shard)
    if gradient:
        all_logits[:, terms.count :] = 0
        student.copy_((grad_log_probs - p * sums[:, 5:]) * compute_logit_derivative(x, terms))
    sums[:, 4].clamp_(max=1)
    return sums[:, :5]


def divergence_terms(lp: Tensor, lq: Tensor, mixture: KLMixture) -> tuple[Tensor, Tensor]:
    """Summand of each id in the divergence, and its derivative with respect to its log-probability."""
    p, q = lp.exp(), lq.exp()
    divergence, grad_log_probs = torch.zeros_like(p), torch.zeros_like(p)
    if mixture.forward:
        s = mixture.forward_skew
        m = (s * q + (1 - s) * p).clamp(min=MIN_PROB)
        divergence += mixture.forward * q * (lq - (m.log() if s else lp))
        grad_log_probs -= mixture.forward * (1 - s) * q * (p / m if s else 1)
    if mixture.reverse:
        t = mixture.reverse_skew
        n = (t * p + (1 - t) * q).clamp(min=MIN_PROB)
        reverse_kl = p * (lp - (n.log() if t else lq))
        divergence += mixture.reverse * reverse_kl
        grad_log_probs += mixture.reverse * (reverse_kl - t * p * (p / n))
    return divergence, grad_log_probs


def compute_logit_derivative(x: Tensor, terms: KLTerms) -> Tensor | float:
    """Derivative of the scaled logit with respect to the raw logit, times the weight of the divergence."""
    (scale, softcap), temperature = terms.student, terms.mixture.temperature
    factor = terms.weight * scale / temperature
    return factor * (1 - (x * temperature / softcap).square()) if softcap else factor


def log_softmax(x: Tensor, maximum: Tensor, vocab_shard: VocabShard | None) -> Tensor:
    """Log-softmax of the local ids; `maximum` (n, 1) is that over all ids."""
    x = x - maximum  # before the sum, which is inaccurate for large values
    return x - sum_over_ranks(x.exp().sum(-1, keepdim=True), vocab_shard).log()


# C++ version


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        for student in DTYPES.values():
            for teacher in DTYPES.values():
                getattr(lib, f"compute_divergences_{student}_{teacher}").argtypes = [*[pointer] * 5, integer, integer]
            getattr(lib, f"compute_top_k_divergences_{student}").argtypes = [*[pointer] * 6, integer, integer]
            getattr(lib, f"compute_top_k_log_probs_{student}").argtypes = [*[pointer] * 5, integer]
    return lib


def is_supported(*logits: Tensor) -> bool:
    """Whether the C++ functions support these logits."""
    is_native = all(fake_mode.device_type(x) == "cpu" and x.dtype in DTYPES and x.stride(1) == 1 for x in logits)
    return is_native and (fake_mode.is_fake() or compiled() is not None)


def divergences_cpu(student: Tensor, teacher: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """`divergences_reference` in C++, for logits on the CPU."""
    check_logits(student, teacher, terms.count)
    out = torch.empty(len(student), len(METRICS) - 1)
    if fake_mode.is_fake():
        return out
    values = (ctypes.c_float * 10)(*terms.values)
    sizes = (ctypes.c_int64 * 5)(len(student), terms.count, student.shape[1], student.stride(0), teacher.stride(0))
    kernel = getattr(compiled(), f"compute_divergences_{DTYPES[student.dtype]}_{DTYPES[teacher.dtype]}")
    kernel(student.data_ptr(), teacher.data_ptr(), values, out.data_ptr(), sizes, gradient, torch.get_num_threads())
    return out


# Triton version: one launch, no temporary memory


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernel supports the tensor; in fake mode, whether a GPU is simulated."""
    return fake_mode.device_type(x) == "cuda" if fake_mode.is_fake() else uses_triton(x)


def divergences_gpu(student: Tensor, teacher: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """`divergences_reference` in Triton, for logits on a GPU."""
    check_logits(student, teacher, terms.count)
    if fake_mode.is_fake():
        return student.new_empty(len(student), len(METRICS) - 1, dtype=torch.float32)
    return triton_kernels("kl_divergence").divergences(student, teacher, terms.values, terms.count, gradient)


# Teacher with top-k log-probabilities


@dataclass(frozen=True)
class TopKTargets:
    """Top-k tokens of a teacher: `ids` (N, k) and `log_probs` (N, k + 1) at a temperature.

    The last log-probability is that of all other ids that both models embed. `index` maps tokens to rows of `ids`.
    """

    ids: Tensor
    log_probs: Tensor
    index: Tensor
    num_ids: int  # number of ids of the teacher

    def divergences(self, logits: Tensor, rows: Tensor, mixture: KLMixture, head: LMHead, gradient: bool) -> Tensor:
        terms, index = make_terms(mixture, head, self.num_ids), self.index.index_select(0, rows)
        kernel = (
            top_k_divergences_cpu
            if head.vocab_shard is None and head.softcap is None and is_supported(logits)
            else top_k_divergences_reference
        )
        return kernel(logits, self.ids.index_select(0, index), self.log_probs.index_select(0, index), terms, gradient)


def top_k_divergences_reference(
    logits: Tensor, ids: Tensor, teacher_log_probs: Tensor, terms: KLTerms, gradient: bool
) -> Tensor:
    """`divergences_reference` over the top-k ids, with all other ids as one. The student's entropy is over all ids."""
    vocab_shard, all_logits, logits = terms.vocab_shard, logits, logits[:, : terms.count]
    x = scale_logits(logits, *terms.student) / terms.mixture.temperature
    columns_of_ids = ids.long() - (0 if vocab_shard is None else vocab_shard.start)
    is_local = (columns_of_ids >= 0) & (columns_of_ids < terms.count)
    columns_of_ids, maximum = columns_of_ids.where(is_local, 0), max_over_vocab(x, vocab_shard)
    derivative = compute_logit_derivative(x, terms) if gradient else 1.0
    x = log_softmax(x, maximum, vocab_shard)
    max_log_prob = max_over_vocab(x, vocab_shard)
    top_log_probs = torch.zeros_like(teacher_log_probs[:, :-1])
    if terms.count:
        top_log_probs = x.gather(1, columns_of_ids).where(is_local, 0)
    top_log_probs = sum_over_ranks(top_log_probs, vocab_shard)
    entropy = -sum_over_ranks((x.exp() * x.clamp(min=MIN_LOG_PROB)).sum(-1, keepdim=True), vocab_shard)
    scatter_index, first_local, has_local = scatter_columns(columns_of_ids, is_local)
    if terms.count:
        x.scatter_(1, scatter_index, x.gather(1, scatter_index).masked_fill(has_local, -torch.inf))
    rest_maximum = max_over_vocab(x, vocab_shard).clamp(min=MIN_LOG_PROB)  # avoids underflow of all exponentials
    rest = rest_maximum + sum_over_ranks((x - rest_maximum).exp().sum(-1, keepdim=True), vocab_shard).log()
    lp = torch.cat([top_log_probs, rest], dim=1).clamp(min=MIN_LOG_PROB)
    lq = teacher_log_probs.float().clamp(min=MIN_LOG_PROB)
    divergence, grad_log_probs = divergence_terms(lp, lq, terms.mixture)
    if gradient:
        grad_log_probs = grad_log_probs - lp.exp() * grad_log_probs.sum(-1, keepdim=True)
        x = (x - rest.clamp(min=MIN_LOG_PROB)).exp_().mul_(grad_log_probs[:, -1:])
        if terms.count:
            top_grads = grad_log_probs[:, :-1].where(is_local, grad_log_probs.gather(1, first_local))
            x.scatter_(1, scatter_index, top_grads.where(has_local, x.gather(1, scatter_index)))
        all_logits[:, terms.count :] = 0
        logits.copy_(x * derivative)
    agreement = top_log_probs[:, :1] == max_log_prob
    kl, teacher_entropy = (lq.exp() * (lq - lp)).sum(-1), -(lq.exp() * lq).sum(-1)
    metrics = divergence.sum(-1), kl, entropy.squeeze(1), teacher_entropy, agreement.squeeze(1)
    return torch.stack([metric.float() for metric in metrics], dim=1)


def scatter_columns(columns: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns (N, k) for a scatter: non-local ids are replaced by the first local id of the row.

    Also returns the index (N, 1) of this id, and whether it exists (N, 1). Selecting the local ids would synchronize.
    """
    first, has_local = is_local.int().argmax(1, keepdim=True), is_local.any(1, keepdim=True)
    return columns.where(is_local, columns.gather(1, first)), first, has_local


def top_k_divergences_cpu(logits: Tensor, ids: Tensor, log_probs: Tensor, terms: KLTerms, gradient: bool) -> Tensor:
    """`top_k_divergences_reference` in C++, for logits on the CPU without softcap."""
    out = torch.empty(len(logits), len(METRICS) - 1)
    if fake_mode.is_fake():
        return out
    values, ids = (ctypes.c_float * 10)(*terms.values), to_int32_ids(logits, ids, terms.count)
    check_shape("kl_divergence", "log_probs", log_probs, (len(logits), ids.shape[1] + 1))
    log_probs = log_probs.float().contiguous()
    sizes = (ctypes.c_int64 * 5)(len(logits), terms.count, logits.shape[1], logits.stride(0), ids.shape[1])
    kernel = getattr(compiled(), f"compute_top_k_divergences_{DTYPES[logits.dtype]}")
    pointers = logits.data_ptr(), ids.data_ptr(), log_probs.data_ptr(), values, out.data_ptr()
    kernel(*pointers, sizes, gradient, torch.get_num_threads())
    return out


def to_int32_ids(logits: Tensor, ids: Tensor, count: int) -> Tensor:
    """Contiguous int32 ids (n, k), as the C++ functions read them. Raises IndexError unless they are below `count`."""
    check_contiguous_rows("kl_divergence", "logits", logits)
    check_dim("kl_divergence", "ids", ids, 2)
    check_tensor("kl_divergence", "ids", ids, (len(logits), max(1, ids.shape[1])), ids.dtype, logits.device)
    if count > logits.shape[1]:
        raise ValueError(f"kl_divergence: logits have {logits.shape[1]} ids, expected at least {count}")
    check_index_range("kl_divergence", "ids", ids, count)
    return ids.int().contiguous()


@torch.no_grad()
def top_k_targets(
    hidden: Tensor, head: LMHead, rows: Tensor, top_k: int, temperature: float, num_ids: int
) -> TopKTargets:
    """Top-k targets of `rows` (n,) of teacher states `hidden` (N, dim), among the first `num_ids` ids."""
    chunks = TopKChunks(head, top_k, temperature, num_ids)
    TokenChunks(head, chunks, rows, rows).run(hidden, [], False)
    top_ids = torch.cat([hidden.new_zeros(0, top_k, dtype=torch.int32), *(num_ids for num_ids, _ in chunks.results)])
    log_probs = torch.cat(
        [hidden.new_zeros(0, top_k + 1, dtype=torch.float32), *(log_probs for _, log_probs in chunks.results)]
    )
    return TopKTargets(top_ids, log_probs, index_in_rows(rows, len(hidden)), num_ids_of(head))


def index_in_rows(rows: Tensor, count: int) -> Tensor:
    """Inverse of `rows` (n,): the index in `rows` of each of `count` tokens, 0 if it is not in `rows`; (count,)."""
    return rows.new_zeros(count).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))


@dataclass(frozen=True)
class TopKChunks:
    """Chunk loss that collects top-k ids and their log-probabilities."""

    head: LMHead
    top_k: int
    temperature: float
    num_ids: int
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        all_logits = logits if self.head.vocab_shard is None else self.head.vocab_shard.all_gather(logits)
        raw, transform = all_logits[:, : self.num_ids], (self.head.scale, self.head.softcap)
        ids = torch.cat([chunk.float().topk(self.top_k, dim=-1).indices.int() for chunk in raw.split(ROW_CHUNK)])
        kernel = top_k_log_probs_cpu if self.head.softcap is None and is_supported(raw) else top_k_log_probs_reference
        log_probs = kernel(raw, ids, transform, self.temperature)
        self.results.append((ids, log_probs))
        return log_probs.new_zeros(len(log_probs))


def top_k_log_probs_reference(
    raw: Tensor, ids: Tensor, transform: tuple[float, float | None], temperature: float
) -> Tensor:
    """Log-probabilities (n, k + 1) of `ids` (n, k), and of all other ids together, from raw logits."""
    x, index = scale_logits(raw, *transform) / temperature, ids.long()
    x -= x.amax(-1, keepdim=True)  # before the sum, which is inaccurate for large values
    log_normalizer = x.logsumexp(-1, keepdim=True)
    log_probs = x.gather(1, index) - log_normalizer
    return torch.cat([log_probs, x.scatter_(1, index, -torch.inf).logsumexp(-1, keepdim=True) - log_normalizer], dim=1)


def top_k_log_probs_cpu(raw: Tensor, ids: Tensor, transform: tuple[float, float | None], temperature: float) -> Tensor:
    """`top_k_log_probs_reference` in C++, for logits on the CPU without softcap."""
    out = torch.empty(len(ids), ids.shape[1] + 1)
    if fake_mode.is_fake():
        return out
    terms = KLTerms(KLMixture(temperature=temperature), (1.0, None), transform, raw.shape[1], None)
    values, ids = (ctypes.c_float * 10)(*terms.values), to_int32_ids(raw, ids, terms.count)
    sizes = (ctypes.c_int64 * 5)(len(raw), terms.count, raw.shape[1], raw.stride(0), ids.shape[1])
    kernel = getattr(compiled(), f"compute_top_k_log_probs_{DTYPES[raw.dtype]}")
    kernel(raw.data_ptr(), ids.data_ptr(), out.data_ptr(), values, sizes, torch.get_num_threads())
    return out
