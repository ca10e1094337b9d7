"""Losses of tokens on a GPU, and their gradients in place of the logits. cross_entropy.py loads this there."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# There is no Triton on macOS and Windows, nor a GPU that would load this file.

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 8192  # logits that a program holds at once


# Triton's own `max` and `sum` do not run under the interpreter if it was turned on after they were imported.
@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def added(a, b):
    return a + b


@triton.jit
def tanh(x):
    """Off by 9e-9 where it is a polynomial: there the other formula would cancel."""
    z = x * x
    p = -0.3333328068256378 + z * (
        0.13331441581249237 + z * (-0.05373971536755562 + z * (0.0206390842795372 - z * 0.00570498313754797))
    )
    far = 1 - 2 / (tl.exp(2 * tl.minimum(tl.abs(x), 10.0)) + 1)
    found = tl.where(tl.abs(x) < 0.625, x + x * z * p, tl.where(x < 0, -far, far))
    return tl.where(x == x, found, x)  # a minimum forgets what is no number


@triton.jit
def capped(x, scale, softcap, CAP: tl.constexpr):
    x = x.to(tl.float32) * scale
    if CAP:
        x = softcap * tanh(x / softcap)
    return x


@triton.jit
def sums(at, vocab, scale, softcap, CAP: tl.constexpr, SIZE: tl.constexpr):
    """The largest logit, and of logits less that: the sum of their exponentials, and their own."""
    most, exps, plain = -3e38, 0.0, 0.0
    for start in range(0, vocab, SIZE):
        place = start + tl.arange(0, SIZE)
        real = place < vocab
        x = tl.where(real, capped(tl.load(at + place, real, 0), scale, softcap, CAP), -3e38)
        top = tl.maximum(most, tl.reduce(x, 0, larger))
        exps = exps * tl.exp(most - top) + tl.reduce(tl.exp(x - top), 0, added)
        plain = plain + start * (most - top) + tl.reduce(tl.where(real, x - top, 0.0), 0, added)
        most = top
    return most, exps, plain


@triton.jit
def losses_kernel(  # noqa: PLR0913 (a launch has no other way to pass them)
    logits, targets, weights, losses, vocab, stride, scale, softcap, smoothing, z_loss,
    CAP: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab)
    right = capped(tl.load(at + target, known, 0), scale, softcap, CAP)

    most, exps, plain = sums(at, vocab, scale, softcap, CAP, SIZE)
    whole = most + tl.log(exps)
    loss = tl.log(exps) - (1 - smoothing) * (right - most) + z_loss * whole * whole
    if smoothing > 0:
        loss -= smoothing * plain / vocab
    loss = tl.where(known, loss, float("nan"))  # a target beyond the vocabulary must not pass unseen
    tl.store(losses + row, tl.where(target < 0, 0.0, loss))

    if GRADIENT:
        weight = tl.load(weights + row) if WEIGHTED else 1.0
        share = (1 + 2 * z_loss * whole) / exps
        spread = smoothing / vocab
        for start in range(0, vocab, SIZE):
            place = start + tl.arange(0, SIZE)
            real = place < vocab
            x = capped(tl.load(at + place, real, 0), scale, softcap, CAP)
            grad = tl.exp(x - most) * share - spread - tl.where(place == target, 1 - smoothing, 0.0)
            if CAP:
                grad *= 1 - (x / softcap) * (x / softcap)
            grad = tl.where(target < 0, 0.0, grad * (weight * scale))
            tl.store(at + place, grad.to(logits.dtype.element_ty), real)


@triton.jit
def entropies_kernel(  # noqa: PLR0913
    logits, entropies, vocab, stride, scale, softcap, CAP: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * stride
    most, exps, spread = -3e38, 0.0, 0.0  # spread: of logits less the largest, each times its exponential
    for start in range(0, vocab, SIZE):
        place = start + tl.arange(0, SIZE)
        x = tl.where(place < vocab, capped(tl.load(at + place, place < vocab, 0), scale, softcap, CAP), -3e38)
        top = tl.maximum(most, tl.reduce(x, 0, larger))
        shares, fade = tl.exp(x - top), tl.exp(most - top)
        spread = tl.where(fade > 0, fade * (spread + (most - top) * exps), 0.0)
        spread += tl.reduce(tl.where(shares > 0, shares * (x - top), 0.0), 0, added)
        exps = exps * fade + tl.reduce(shares, 0, added)
        most = top
    tl.store(entropies + row, tl.log(exps) - spread / exps)


def token_entropies(logits: Tensor, terms: list[float]) -> Tensor:
    """Entropies (n,) of logits (n, vocab), of which `terms` are scale and softcap first; a program for each row."""
    rows, vocab = logits.shape
    entropies = torch.empty(rows, device=logits.device)
    if rows:
        size, warps = sizes(vocab)
        entropies_kernel[(rows,)](
            logits, entropies, vocab, logits.stride(0), *terms[:2], CAP=terms[1] > 0, SIZE=size, num_warps=warps
        )
    return entropies


def sizes(vocab: int) -> tuple[int, int]:
    """Logits of a turn of a program, and its warps."""
    size = min(1 << (vocab - 1).bit_length(), MOST)
    return size, max(1, min(16, size // 512))


def token_losses(logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool) -> Tensor:
    """Losses (n,) of logits (n, vocab), which become the gradient; a program for each row."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, device=logits.device)
    if rows == 0:
        return losses
    assert logits.stride(1) == 1
    size, warps = sizes(vocab)
    losses_kernel[(rows,)](
        logits,
        targets.contiguous(),
        losses if weights is None else weights.float().contiguous(),
        losses,
        vocab,
        logits.stride(0),
        *terms,
        CAP=terms[1] > 0,
        WEIGHTED=weights is not None,
        GRADIENT=gradient,
        SIZE=size,
        num_warps=warps,
        enable_fp_fusion=False,  # losses have the same bits with and without the gradient
    )
    return losses
