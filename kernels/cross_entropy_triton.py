"""Triton kernels of cross-entropy and entropy; gradients are written over the logits. Loaded by cross_entropy.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SIZE = 8192  # logits that a program loads at once


# tl.max and tl.sum do not work in the interpreter if it was enabled after they were imported.
@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def added(a, b):
    return a + b


@triton.jit
def tanh(x):
    """Hyperbolic tangent. Uses a polynomial near zero (error 9e-9), where the other formula cancels."""
    z = x * x
    p = -0.3333328068256378 + z * (
        0.13331441581249237 + z * (-0.05373971536755562 + z * (0.0206390842795372 - z * 0.00570498313754797))
    )
    far = 1 - 2 / (tl.exp(2 * tl.minimum(tl.abs(x), 10.0)) + 1)
    y = tl.where(tl.abs(x) < 0.625, x + x * z * p, tl.where(x < 0, -far, far))
    return tl.where(x == x, y, x)  # tl.minimum drops NaN


@triton.jit
def capped(x, scale, softcap, CAP: tl.constexpr):
    x = x.to(tl.float32) * scale
    if CAP:
        x = softcap * tanh(x / softcap)
    return x


@triton.jit
def sums(at, vocab, scale, softcap, CAP: tl.constexpr, SIZE: tl.constexpr):
    """Maximum m of the scaled logits x, sum of exp(x - m), and sum of x - m."""
    top, exps, total = -3e38, 0.0, 0.0
    for start in range(0, vocab, SIZE):
        place = start + tl.arange(0, SIZE)
        real = place < vocab
        x = tl.where(real, capped(tl.load(at + place, real, 0), scale, softcap, CAP), -3e38)
        new_top = tl.maximum(top, tl.reduce(x, 0, larger))
        exps = exps * tl.exp(top - new_top) + tl.reduce(tl.exp(x - new_top), 0, added)
        total = total + start * (top - new_top) + tl.reduce(tl.where(real, x - new_top, 0.0), 0, added)
        top = new_top
    return top, exps, total


@triton.jit
def losses_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    logits, targets, weights, losses, vocab, stride, scale, softcap, smoothing, z_loss,
    CAP: tl.constexpr, WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    is_valid = (target >= 0) & (target < vocab)
    target_logit = capped(tl.load(at + target, is_valid, 0), scale, softcap, CAP)

    top, exps, total = sums(at, vocab, scale, softcap, CAP, SIZE)
    log_normalizer = top + tl.log(exps)
    loss = tl.log(exps) - (1 - smoothing) * (target_logit - top) + z_loss * log_normalizer * log_normalizer
    if smoothing > 0:
        loss -= smoothing * total / vocab
    loss = tl.where(is_valid, loss, float("nan"))  # reports targets >= vocab
    tl.store(losses + row, tl.where(target < 0, 0.0, loss))

    if GRADIENT:
        weight = tl.load(weights + row) if WEIGHTED else 1.0
        share = (1 + 2 * z_loss * log_normalizer) / exps
        spread = smoothing / vocab
        for start in range(0, vocab, SIZE):
            place = start + tl.arange(0, SIZE)
            real = place < vocab
            x = capped(tl.load(at + place, real, 0), scale, softcap, CAP)
            grad = tl.exp(x - top) * share - spread - tl.where(place == target, 1 - smoothing, 0.0)
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
    top, exps, spread = -3e38, 0.0, 0.0  # spread: sum of (x - top) exp(x - top)
    for start in range(0, vocab, SIZE):
        place = start + tl.arange(0, SIZE)
        x = tl.where(place < vocab, capped(tl.load(at + place, place < vocab, 0), scale, softcap, CAP), -3e38)
        new_top = tl.maximum(top, tl.reduce(x, 0, larger))
        weights, decay = tl.exp(x - new_top), tl.exp(top - new_top)
        spread = tl.where(decay > 0, decay * (spread + (top - new_top) * exps), 0.0)
        spread += tl.reduce(tl.where(weights > 0, weights * (x - new_top), 0.0), 0, added)
        exps = exps * decay + tl.reduce(weights, 0, added)
        top = new_top
    tl.store(entropies + row, tl.log(exps) - spread / exps)


def token_entropies(logits: Tensor, terms: list[float]) -> Tensor:
    """Entropies (n,) of raw logits (n, vocab); `terms` starts with scale and softcap. One program per row."""
    rows, vocab = logits.shape
    entropies = torch.empty(rows, device=logits.device)
    if rows:
        size, warps = sizes(vocab)
        entropies_kernel[(rows,)](
            logits, entropies, vocab, logits.stride(0), *terms[:2], CAP=terms[1] > 0, SIZE=size, num_warps=warps
        )
    return entropies


def sizes(vocab: int) -> tuple[int, int]:
    """Logits per iteration, and warps of a program."""
    size = min(1 << (vocab - 1).bit_length(), MAX_SIZE)
    return size, max(1, min(16, size // 512))


def token_losses(logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool) -> Tensor:
    """Losses (n,) of raw logits (n, vocab); writes the gradient over the logits. One program per row."""
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
        enable_fp_fusion=False,  # losses are bit-identical with and without gradient
    )
    return losses
