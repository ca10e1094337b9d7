"""Triton kernel of KL divergences between two sets of logits; writes the gradient over the student's logits.

Loaded by kl_divergence.py on GPUs. The torch reference needs about 14 temporary fp32 tensors (n, vocab), this
kernel none.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton is not available on macOS and Windows.
# ruff: noqa: PLR0913 (kernels take scalars as separate arguments)

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_LOG_PROB, MIN_PROB = tl.constexpr(-1e4), tl.constexpr(1e-37)  # as in kl_divergence.py
# Logits of each model that a program loads at once, 8 per thread. On sm_90 the kernel takes 64 to 100 registers, so
# that 2 to 4 programs run on an SM, which loads 16 to 32 KB at a time. 16 warps for 4,096 logits fit only once.
MAX_BLOCK_SIZE, LOGITS_PER_WARP = 2048, 256
ABSENT, PLAIN, SKEWED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # variants of each term of a mixture
NUM_METRICS = tl.constexpr(5)  # divergence, KL, both entropies, agreement


# tl.max and tl.sum do not work in the interpreter if it was enabled after they were imported.
@triton.jit
def maximum(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def clamp_min(x, low):
    """max(x, low), which propagates NaN."""
    return tl.where(x < low, low, x)


@triton.jit
def tanh(x):
    """Hyperbolic tangent. Uses a polynomial near zero (error 9e-9), where the other formula cancels."""
    z = x * x
    p = -0.3333328068256378 + z * (
        0.13331441581249237 + z * (-0.05373971536755562 + z * (0.0206390842795372 - z * 0.00570498313754797))
    )
    magnitude = tl.where(tl.abs(x) > 10.0, 10.0, tl.abs(x))
    from_exp = 1 - 2 / (tl.exp(2 * magnitude) + 1)
    return tl.where(magnitude < 0.625, x + x * z * p, tl.where(x < 0, -from_exp, from_exp))


@triton.jit
def load_logits(row_logits, ids, num_ids, scale, softcap, inverse_temperature, HAS_SOFTCAP: tl.constexpr):
    """softcap(scale * logits) / temperature in fp32, -inf beyond `num_ids`."""
    x = tl.load(row_logits + ids, ids < num_ids, 0).to(tl.float32) * scale
    if HAS_SOFTCAP:
        x = softcap * tanh(x / softcap)
    return tl.where(ids < num_ids, x * inverse_temperature, float("-inf"))


@triton.jit
def update_lanes(x, lane_max, lane_sum):
    """Online log-sum-exp of each lane: its maximum m, and the sum of exp(x - m)."""
    difference = x - lane_max
    decay = tl.exp(-tl.abs(difference))
    return tl.where(difference > 0, x, lane_max), tl.where(difference > 0, lane_sum * decay + 1, lane_sum + decay)


@triton.jit
def reduce_lanes(lane_max, lane_sum):
    """Maximum m over all lanes, and log of the sum of exp(x - m)."""
    max_logit = tl.reduce(lane_max, 0, maximum)
    return max_logit, tl.log(tl.reduce(lane_sum * tl.exp(lane_max - max_logit), 0, add))


@triton.jit
def compute_terms(lp, lq, forward, forward_skew, reverse, reverse_skew, FORWARD: tl.constexpr, REVERSE: tl.constexpr):
    """Summand of each id in the divergence, and its derivative with respect to log p."""
    p = tl.exp(lp)
    q = tl.exp(lq)
    divergence = tl.full(lp.shape, 0.0, tl.float32)
    grad_log_prob = tl.full(lp.shape, 0.0, tl.float32)
    if FORWARD == PLAIN:
        divergence += forward * (q * (lq - lp))
        grad_log_prob -= forward * q
    if FORWARD == SKEWED:
        m = clamp_min(forward_skew * q + (1 - forward_skew) * p, MIN_PROB)
        divergence += forward * (q * (lq - tl.log(m)))
        grad_log_prob -= forward * (1 - forward_skew) * (q * (p / m))
    if REVERSE == PLAIN:
        reverse_kl = reverse * (p * (lp - lq))
        divergence += reverse_kl
        grad_log_prob += reverse_kl
    if REVERSE == SKEWED:
        n = clamp_min(reverse_skew * p + (1 - reverse_skew) * q, MIN_PROB)
        reverse_kl = p * (lp - tl.log(n))
        divergence += reverse * reverse_kl
        grad_log_prob += reverse * (reverse_kl - reverse_skew * (p * (p / n)))
    return divergence, grad_log_prob


@triton.jit
def load_pair(
    student, teacher, ids, num_ids, student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
    HAS_STUDENT_SOFTCAP: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits of both models at the same ids."""
    x = load_logits(student, ids, num_ids, student_scale, student_softcap, inverse_temperature, HAS_STUDENT_SOFTCAP)
    y = load_logits(teacher, ids, num_ids, teacher_scale, teacher_softcap, inverse_temperature, HAS_TEACHER_SOFTCAP)
    return x, y


@triton.jit
def compute_log_sums(
    student, teacher, num_ids, student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
    HAS_STUDENT_SOFTCAP: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Maximum logit m of each model, and log of the sum of exp(x - m)."""
    lane_max_x = tl.full((BLOCK_SIZE,), -3e38, tl.float32)
    lane_max_y = tl.full((BLOCK_SIZE,), -3e38, tl.float32)
    lane_sum_x = tl.full((BLOCK_SIZE,), 0.0, tl.float32)
    lane_sum_y = tl.full((BLOCK_SIZE,), 0.0, tl.float32)
    for start in range(0, num_ids, BLOCK_SIZE):
        x, y = load_pair(
            student, teacher, start + tl.arange(0, BLOCK_SIZE), num_ids,
            student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
            HAS_STUDENT_SOFTCAP, HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        lane_max_x, lane_sum_x = update_lanes(x, lane_max_x, lane_sum_x)
        lane_max_y, lane_sum_y = update_lanes(y, lane_max_y, lane_sum_y)
    max_x, log_sum_x = reduce_lanes(lane_max_x, lane_sum_x)
    max_y, log_sum_y = reduce_lanes(lane_max_y, lane_sum_y)
    return max_x, log_sum_x, max_y, log_sum_y


@triton.jit
def store_gradient(
    student, ids, num_ids, vocab_size, x, lp, grad_log_prob, grad_sum, grad_scale, temperature_over_softcap,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write the gradient over raw logits; it is zero for ids without teacher."""
    grad = (grad_log_prob - tl.exp(lp) * grad_sum) * grad_scale
    if HAS_SOFTCAP:
        grad *= 1 - (x * temperature_over_softcap) * (x * temperature_over_softcap)
    grad = tl.where(ids < num_ids, grad, 0.0)
    tl.store(student + ids, grad.to(student.dtype.element_ty), ids < vocab_size)


@triton.jit
def store_sums(metrics, divergence_sums, kl_sums, student_entropies, teacher_entropies):
    """Store all metrics of a row except the agreement."""
    tl.store(metrics, tl.reduce(divergence_sums, 0, add))
    tl.store(metrics + 1, tl.reduce(kl_sums, 0, add))
    tl.store(metrics + 2, tl.reduce(student_entropies, 0, add))
    tl.store(metrics + 3, tl.reduce(teacher_entropies, 0, add))


@triton.jit
def compute_metrics(
    student, teacher, metrics, num_ids, vocab_size,
    student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
    temperature_over_softcap, grad_scale, forward, forward_skew, reverse, reverse_skew,
    max_x, log_sum_x, max_y, log_sum_y,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HAS_STUDENT_SOFTCAP: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Store the metrics of a row, return the sum of `grad_log_prob`.

    WRITE_GRADIENT: this sum is -forward, so write the gradient too.
    """
    zeros = tl.full((BLOCK_SIZE,), 0.0, tl.float32)
    divergence_sums, kl_sums, student_entropies = zeros, zeros, zeros
    teacher_entropies, grad_sums, agreement = zeros, zeros, zeros
    for start in range(0, vocab_size if WRITE_GRADIENT else num_ids, BLOCK_SIZE):
        ids = start + tl.arange(0, BLOCK_SIZE)
        x, y = load_pair(
            student, teacher, ids, num_ids, student_scale, student_softcap, teacher_scale, teacher_softcap,
            inverse_temperature, HAS_STUDENT_SOFTCAP, HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        lp = clamp_min(x - max_x - log_sum_x, MIN_LOG_PROB)
        lq = clamp_min(y - max_y - log_sum_y, MIN_LOG_PROB)
        term, grad_log_prob = compute_terms(lp, lq, forward, forward_skew, reverse, reverse_skew, FORWARD, REVERSE)
        divergence_sums += term
        kl_sums += tl.exp(lq) * (lq - lp)
        student_entropies -= tl.exp(lp) * lp
        teacher_entropies -= tl.exp(lq) * lq
        agreement = tl.where((x == max_x) & (y == max_y), 1.0, agreement)
        grad_sums += grad_log_prob
        if WRITE_GRADIENT:
            store_gradient(
                student, ids, num_ids, vocab_size, x, lp, grad_log_prob, -forward, grad_scale,
                temperature_over_softcap, HAS_STUDENT_SOFTCAP,
            )  # fmt: skip
    store_sums(metrics, divergence_sums, kl_sums, student_entropies, teacher_entropies)
    has_max = (log_sum_x == log_sum_x) & (log_sum_y == log_sum_y)  # NaN logits have no maximum
    tl.store(metrics + 4, tl.where(has_max, tl.reduce(agreement, 0, maximum), 0.0))
    return tl.reduce(grad_sums, 0, add)


@triton.jit
def divergence_kernel(
    student, teacher, metrics, num_ids, vocab_size, student_stride, teacher_stride,
    student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
    temperature_over_softcap, grad_scale, forward, forward_skew, reverse, reverse_skew,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, HAS_STUDENT_SOFTCAP: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One row per program, with three passes over the logits: sums of exponentials, metrics, gradient.

    For plain forward KL, the sum that the gradient needs is a constant, so the second pass writes the gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    max_x, log_sum_x, max_y, log_sum_y = compute_log_sums(
        student, teacher, num_ids, student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
        HAS_STUDENT_SOFTCAP, HAS_TEACHER_SOFTCAP, BLOCK_SIZE,
    )  # fmt: skip
    IS_GRAD_SUM_CONSTANT: tl.constexpr = NEEDS_GRADIENT and FORWARD == PLAIN and REVERSE == ABSENT
    grad_sum = compute_metrics(
        student, teacher, metrics + row * NUM_METRICS, num_ids, vocab_size,
        student_scale, student_softcap, teacher_scale, teacher_softcap, inverse_temperature,
        temperature_over_softcap, grad_scale, forward, forward_skew, reverse, reverse_skew,
        max_x, log_sum_x, max_y, log_sum_y, FORWARD, REVERSE, HAS_STUDENT_SOFTCAP, HAS_TEACHER_SOFTCAP,
        IS_GRAD_SUM_CONSTANT, BLOCK_SIZE,
    )  # fmt: skip
    if NEEDS_GRADIENT and not IS_GRAD_SUM_CONSTANT:
        for start in range(0, vocab_size, BLOCK_SIZE):
            ids = start + tl.arange(0, BLOCK_SIZE)
            x, y = load_pair(
                student, teacher, ids, num_ids, student_scale, student_softcap, teacher_scale, teacher_softcap,
                inverse_temperature, HAS_STUDENT_SOFTCAP, HAS_TEACHER_SOFTCAP,
            )  # fmt: skip
            lp = clamp_min(x - max_x - log_sum_x, MIN_LOG_PROB)
            lq = clamp_min(y - max_y - log_sum_y, MIN_LOG_PROB)
            term, grad_log_prob = compute_terms(lp, lq, forward, forward_skew, reverse, reverse_skew, FORWARD, REVERSE)
            store_gradient(
                student, ids, num_ids, vocab_size, x, lp, grad_log_prob, grad_sum, grad_scale,
                temperature_over_softcap, HAS_STUDENT_SOFTCAP,
            )  # fmt: skip


def choose_variant(weight: float, skew: float) -> int:
    """Variant of a term of the mixture."""
    return ((SKEWED if skew else PLAIN) if weight else ABSENT).value


def divergences(student: Tensor, teacher: Tensor, values: list[float], num_ids: int, gradient: bool) -> Tensor:
    """Metrics (n, 5) of raw logits (n, vocab) and (n, num_ids). `gradient`: write it over the student's logits.

    `values` are `KLTerms.values` of kl_divergence.py.
    """
    rows, vocab_size = student.shape
    metrics = torch.empty(rows, NUM_METRICS.value, device=student.device)
    if rows == 0:
        return metrics
    student_scale, student_softcap, teacher_scale, teacher_softcap, temperature = values[:5]
    forward, forward_skew, reverse, reverse_skew, weight = values[5:]
    assert student.stride(1) == teacher.stride(1) == 1
    block_size = min(triton.next_power_of_2(vocab_size), MAX_BLOCK_SIZE)
    temperature_over_softcap = temperature / student_softcap if student_softcap else 0.0
    floats = student_scale, student_softcap, teacher_scale, teacher_softcap, 1 / temperature, temperature_over_softcap
    divergence_kernel[(rows,)](
        *(student, teacher, metrics, num_ids, vocab_size, student.stride(0), teacher.stride(0)),
        *floats,
        weight * student_scale / temperature,
        *(forward, forward_skew, reverse, reverse_skew),
        FORWARD=choose_variant(forward, forward_skew),
        REVERSE=choose_variant(reverse, reverse_skew),
        HAS_STUDENT_SOFTCAP=student_softcap > 0,
        HAS_TEACHER_SOFTCAP=teacher_softcap > 0,
        NEEDS_GRADIENT=gradient,
        BLOCK_SIZE=block_size,
        num_warps=max(1, block_size // LOGITS_PER_WARP),
        enable_fp_fusion=False,  # metrics are bit-identical with and without gradient
    )
    return metrics
