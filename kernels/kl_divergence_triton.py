"""Triton kernel of KL divergences between two sets of logits; writes the gradient over the student's logits.

Loaded by kl_divergence.py on GPUs. The torch reference needs about 14 temporary fp32 tensors (n, vocab), this kernel
none.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton is not available on macOS and Windows.
# ruff: noqa: PLR0913 (kernels take scalars as separate arguments)

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOOR, TINY = tl.constexpr(-1e4), tl.constexpr(1e-37)  # MIN_LOG_PROB and MIN_PROB of kl_divergence.py
# Logits of each model that a program loads at once, 8 per thread. On sm_90 the kernel takes 64 to 100 registers, so
# that 2 to 4 programs run on an SM, which loads 16 to 32 KB at a time. 16 warps for 4,096 logits fit only once.
SIZE, PER_WARP = 2048, 256
ABSENT, PLAIN, SKEWED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # variants of each term of a mixture
COLUMNS = 5  # divergence, KL, both entropies, agreement


# tl.max and tl.sum do not work in the interpreter if it was enabled after they were imported.
@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def at_least(x, limit):
    """max(x, limit), which propagates NaN."""
    return tl.where(x < limit, limit, x)


@triton.jit
def tanh(x):
    """Hyperbolic tangent. Uses a polynomial near zero (error 9e-9), where the other formula cancels."""
    z = x * x
    p = -0.3333328068256378 + z * (
        0.13331441581249237 + z * (-0.05373971536755562 + z * (0.0206390842795372 - z * 0.00570498313754797))
    )
    size = tl.where(tl.abs(x) > 10.0, 10.0, tl.abs(x))
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    return tl.where(size < 0.625, x + x * z * p, tl.where(x < 0, -far, far))


@triton.jit
def load_logits(row, index, count, scale, softcap, rate, CAP: tl.constexpr):
    """softcap(scale * logits) / temperature in fp32, -inf beyond `count`. `rate` is 1 / temperature."""
    x = tl.load(row + index, index < count, 0).to(tl.float32) * scale
    if CAP:
        x = softcap * tanh(x / softcap)
    return tl.where(index < count, x * rate, float("-inf"))


@triton.jit
def accumulate(x, lane_max, lane_sum):
    """Online log-sum-exp of each lane: its maximum m, and the sum of exp(x - m)."""
    gap = x - lane_max
    decay = tl.exp(-tl.abs(gap))
    return tl.where(gap > 0, x, lane_max), tl.where(gap > 0, lane_sum * decay + 1, lane_sum + decay)


@triton.jit
def combine(lane_max, lane_sum):
    """Maximum m over all lanes, and log of the sum of exp(x - m)."""
    top = tl.reduce(lane_max, 0, larger)
    return top, tl.log(tl.reduce(lane_sum * tl.exp(lane_max - top), 0, add))


@triton.jit
def terms_of(lp, lq, forward, forward_skew, reverse, reverse_skew, FORWARD: tl.constexpr, REVERSE: tl.constexpr):
    """Summand of each id in the divergence, and its derivative with respect to p, times p."""
    p = tl.exp(lp)
    q = tl.exp(lq)
    loss = tl.full(lp.shape, 0.0, tl.float32)
    pull = tl.full(lp.shape, 0.0, tl.float32)
    if FORWARD == PLAIN:
        loss += forward * (q * (lq - lp))
        pull -= forward * q
    if FORWARD == SKEWED:
        m = at_least(forward_skew * q + (1 - forward_skew) * p, TINY)
        loss += forward * (q * (lq - tl.log(m)))
        pull -= forward * (1 - forward_skew) * (q * (p / m))
    if REVERSE == PLAIN:
        term = reverse * (p * (lp - lq))
        loss += term
        pull += term
    if REVERSE == SKEWED:
        n = at_least(reverse_skew * p + (1 - reverse_skew) * q, TINY)
        term = p * (lp - tl.log(n))
        loss += reverse * term
        pull += reverse * (term - reverse_skew * (p * (p / n)))
    return loss, pull


@triton.jit
def load_pair(
    student, teacher, index, count, student_scale, student_cap, teacher_scale, teacher_cap, rate,
    STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
):  # fmt: skip
    """Logits of both models at the same ids."""
    x = load_logits(student, index, count, student_scale, student_cap, rate, STUDENT_CAP)
    y = load_logits(teacher, index, count, teacher_scale, teacher_cap, rate, TEACHER_CAP)
    return x, y


@triton.jit
def normalizers(
    student, teacher, count, student_scale, student_cap, teacher_scale, teacher_cap, rate,
    STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Maximum logit m of each model, and log of the sum of exp(x - m)."""
    x_max = tl.full((SIZE,), -3e38, tl.float32)
    y_max = tl.full((SIZE,), -3e38, tl.float32)
    x_sum = tl.full((SIZE,), 0.0, tl.float32)
    y_sum = tl.full((SIZE,), 0.0, tl.float32)
    for start in range(0, count, SIZE):
        x, y = load_pair(
            student, teacher, start + tl.arange(0, SIZE), count,
            student_scale, student_cap, teacher_scale, teacher_cap, rate, STUDENT_CAP, TEACHER_CAP,
        )  # fmt: skip
        x_max, x_sum = accumulate(x, x_max, x_sum)
        y_max, y_sum = accumulate(y, y_max, y_sum)
    x_top, x_log = combine(x_max, x_sum)
    y_top, y_log = combine(y_max, y_sum)
    return x_top, x_log, y_top, y_log


@triton.jit
def store_gradient(
    student, index, count, vocab, x, lp, pull, pull_sum, slope, ratio, CAP: tl.constexpr
):  # fmt: skip
    """Write the gradient over raw logits; it is zero for ids without teacher. `ratio`: temperature / softcap."""
    grad = (pull - tl.exp(lp) * pull_sum) * slope
    if CAP:
        grad *= 1 - (x * ratio) * (x * ratio)
    grad = tl.where(index < count, grad, 0.0)
    tl.store(student + index, grad.to(student.dtype.element_ty), index < vocab)


@triton.jit
def sum_figures(
    student, teacher, out, count, vocab, student_scale, student_cap, teacher_scale, teacher_cap, rate, ratio, slope,
    forward, forward_skew, reverse, reverse_skew, x_top, x_log, y_top, y_log,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
    WRITE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the metrics of a row, return the sum of `pull`. WRITE: the sum is -forward, so write the gradient too."""
    losses = tl.full((SIZE,), 0.0, tl.float32)
    kls, x_entropies, y_entropies, pulls, agree = losses, losses, losses, losses, losses
    for start in range(0, vocab if WRITE else count, SIZE):
        index = start + tl.arange(0, SIZE)
        x, y = load_pair(
            student, teacher, index, count,
            student_scale, student_cap, teacher_scale, teacher_cap, rate, STUDENT_CAP, TEACHER_CAP,
        )  # fmt: skip
        lp = at_least(x - x_top - x_log, FLOOR)
        lq = at_least(y - y_top - y_log, FLOOR)
        loss, pull = terms_of(lp, lq, forward, forward_skew, reverse, reverse_skew, FORWARD, REVERSE)
        losses += loss
        kls += tl.exp(lq) * (lq - lp)
        x_entropies -= tl.exp(lp) * lp
        y_entropies -= tl.exp(lq) * lq
        agree = tl.where((x == x_top) & (y == y_top), 1.0, agree)
        pulls += pull
        if WRITE:
            store_gradient(student, index, count, vocab, x, lp, pull, -forward, slope, ratio, STUDENT_CAP)
    tl.store(out, tl.reduce(losses, 0, add))
    tl.store(out + 1, tl.reduce(kls, 0, add))
    tl.store(out + 2, tl.reduce(x_entropies, 0, add))
    tl.store(out + 3, tl.reduce(y_entropies, 0, add))
    finite = (x_log == x_log) & (y_log == y_log)  # NaN logits have no maximum
    tl.store(out + 4, tl.where(finite, tl.reduce(agree, 0, larger), 0.0))
    return tl.reduce(pulls, 0, add)


@triton.jit
def divergence_kernel(
    student, teacher, out, count, vocab, student_stride, teacher_stride,
    student_scale, student_cap, teacher_scale, teacher_cap, rate, ratio, slope,
    forward, forward_skew, reverse, reverse_skew,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
    GRADIENT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row per program, with three passes over the logits: normalizers, metrics, gradient.

    For plain forward KL, the sum that the gradient needs is a constant, so the second pass writes the gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    x_top, x_log, y_top, y_log = normalizers(
        student, teacher, count, student_scale, student_cap, teacher_scale, teacher_cap, rate,
        STUDENT_CAP, TEACHER_CAP, SIZE,
    )  # fmt: skip
    SAVED: tl.constexpr = GRADIENT and FORWARD == PLAIN and REVERSE == ABSENT
    pull_sum = sum_figures(
        student, teacher, out + row * 5, count, vocab,
        student_scale, student_cap, teacher_scale, teacher_cap, rate, ratio, slope,
        forward, forward_skew, reverse, reverse_skew, x_top, x_log, y_top, y_log,
        FORWARD, REVERSE, STUDENT_CAP, TEACHER_CAP, SAVED, SIZE,
    )  # fmt: skip
    if GRADIENT and not SAVED:
        for start in range(0, vocab, SIZE):
            index = start + tl.arange(0, SIZE)
            x, y = load_pair(
                student, teacher, index, count,
                student_scale, student_cap, teacher_scale, teacher_cap, rate, STUDENT_CAP, TEACHER_CAP,
            )  # fmt: skip
            lp = at_least(x - x_top - x_log, FLOOR)
            lq = at_least(y - y_top - y_log, FLOOR)
            loss, pull = terms_of(lp, lq, forward, forward_skew, reverse, reverse_skew, FORWARD, REVERSE)
            store_gradient(student, index, count, vocab, x, lp, pull, pull_sum, slope, ratio, STUDENT_CAP)


def variant(weight: float, skew: float) -> int:
    """Variant of a term of the mixture."""
    return ((SKEWED if skew else PLAIN) if weight else ABSENT).value


def divergences(student: Tensor, teacher: Tensor, values: list[float], count: int, gradient: bool) -> Tensor:
    """Metrics (n, 5) of raw logits (n, vocab) and (n, count). `gradient`: write it over the student's logits.

    `values` are `KLTerms.values` of kl_divergence.py.
    """
    rows, vocab = student.shape
    out = torch.empty(rows, COLUMNS, device=student.device)
    if rows == 0:
        return out
    student_scale, student_cap, teacher_scale, teacher_cap, temperature = values[:5]
    forward, forward_skew, reverse, reverse_skew, weight = values[5:]
    assert student.stride(1) == teacher.stride(1) == 1
    size = min(triton.next_power_of_2(vocab), SIZE)
    ratio = temperature / student_cap if student_cap else 0.0
    floats = student_scale, student_cap, teacher_scale, teacher_cap, 1 / temperature, ratio
    divergence_kernel[(rows,)](
        *(student, teacher, out, count, vocab, student.stride(0), teacher.stride(0)),
        *floats,
        weight * student_scale / temperature,
        *(forward, forward_skew, reverse, reverse_skew),
        FORWARD=variant(forward, forward_skew),
        REVERSE=variant(reverse, reverse_skew),
        STUDENT_CAP=student_cap > 0,
        TEACHER_CAP=teacher_cap > 0,
        GRADIENT=gradient,
        SIZE=size,
        num_warps=max(1, size // PER_WARP),
        enable_fp_fusion=False,  # metrics are bit-identical with and without gradient
    )
    return out
