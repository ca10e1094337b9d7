"""Triton kernels of cross-entropy and entropy; gradients are written over the logits. Loaded by cross_entropy.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_SIZE = 8192  # logits that a program loads at once


# tl.max and tl.sum do not work in the interpreter if it was enabled after they were imported.
@triton.jit
def maximum(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def tanh(x):
    """Hyperbolic tangent. Uses a polynomial near zero (error 9e-9), where the other formula cancels."""
    z = x * x
    p = -0.3333328068256378 + z * (
        0.13331441581249237 + z * (-0.05373971536755562 + z * (0.0206390842795372 - z * 0.00570498313754797))
    )
    from_exp = 1 - 2 / (tl.exp(2 * tl.minimum(tl.abs(x), 10.0)) + 1)
    y = tl.where(tl.abs(x) < 0.625, x + x * z * p, tl.where(x < 0, -from_exp, from_exp))
    return tl.where(x == x, y, x)  # tl.minimum drops NaN


@triton.jit
def scale_logits(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    x = x.to(tl.float32) * scale
    if HAS_SOFTCAP:
        x = softcap * tanh(x / softcap)
    return x


@triton.jit
def sum_row(row_logits, vocab_size, scale, softcap, HAS_SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Maximum m of the scaled logits x, sum of exp(x - m), and sum of x - m."""
    max_logit, exp_sum, shifted_sum = -3e38, 0.0, 0.0
    for start in range(0, vocab_size, BLOCK_SIZE):
        ids = start + tl.arange(0, BLOCK_SIZE)
        mask = ids < vocab_size
        x = tl.where(mask, scale_logits(tl.load(row_logits + ids, mask, 0), scale, softcap, HAS_SOFTCAP), -3e38)
        new_max = tl.maximum(max_logit, tl.reduce(x, 0, maximum))
        exp_sum = exp_sum * tl.exp(max_logit - new_max) + tl.reduce(tl.exp(x - new_max), 0, add)
        shifted_sum = shifted_sum + start * (max_logit - new_max) + tl.reduce(tl.where(mask, x - new_max, 0.0), 0, add)
        max_logit = new_max
    return max_logit, exp_sum, shifted_sum


@triton.jit
def losses_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    logits, targets, weights, losses, vocab_size, stride, scale, softcap, smoothing, z_loss,
    HAS_SOFTCAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, NEEDS_GRADIENT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    is_valid = (target >= 0) & (target < vocab_size)
    target_logit = scale_logits(tl.load(row_logits + target, is_valid, 0), scale, softcap, HAS_SOFTCAP)

    max_logit, exp_sum, shifted_sum = sum_row(row_logits, vocab_size, scale, softcap, HAS_SOFTCAP, BLOCK_SIZE)
    logsumexp = max_logit + tl.log(exp_sum)
    loss = tl.log(exp_sum) - (1 - smoothing) * (target_logit - max_logit) + z_loss * logsumexp * logsumexp
    if smoothing > 0:
        loss -= smoothing * shifted_sum / vocab_size
    loss = tl.where(is_valid, loss, float("nan"))  # reports targets >= vocab_size
    tl.store(losses + row, tl.where(target < 0, 0.0, loss))

    if NEEDS_GRADIENT:
        weight = tl.load(weights + row) if HAS_WEIGHTS else 1.0
        exp_factor = (1 + 2 * z_loss * logsumexp) / exp_sum
        smoothing_per_id = smoothing / vocab_size
        for start in range(0, vocab_size, BLOCK_SIZE):
            ids = start + tl.arange(0, BLOCK_SIZE)
            mask = ids < vocab_size
            x = scale_logits(tl.load(row_logits + ids, mask, 0), scale, softcap, HAS_SOFTCAP)
            grad = tl.exp(x - max_logit) * exp_factor - smoothing_per_id - tl.where(ids == target, 1 - smoothing, 0.0)
            if HAS_SOFTCAP:
                grad *= 1 - (x / softcap) * (x / softcap)
            grad = tl.where(target < 0, 0.0, grad * (weight * scale))
            tl.store(row_logits + ids, grad.to(logits.dtype.element_ty), mask)


@triton.jit
def entropies_kernel(  # noqa: PLR0913
    logits, entropies, vocab_size, stride, scale, softcap, HAS_SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    max_logit, exp_sum, shifted_exp_sum = -3e38, 0.0, 0.0  # sums of exp(x - m) and (x - m) exp(x - m)
    for start in range(0, vocab_size, BLOCK_SIZE):
        ids = start + tl.arange(0, BLOCK_SIZE)
        mask = ids < vocab_size
        x = tl.where(mask, scale_logits(tl.load(row_logits + ids, mask, 0), scale, softcap, HAS_SOFTCAP), -3e38)
        new_max = tl.maximum(max_logit, tl.reduce(x, 0, maximum))
        exps, decay = tl.exp(x - new_max), tl.exp(max_logit - new_max)
        shifted_exp_sum = tl.where(decay > 0, decay * (shifted_exp_sum + (max_logit - new_max) * exp_sum), 0.0)
        shifted_exp_sum += tl.reduce(tl.where(exps > 0, exps * (x - new_max), 0.0), 0, add)
        exp_sum = exp_sum * decay + tl.reduce(exps, 0, add)
        max_logit = new_max
    tl.store(entropies + row, tl.log(exp_sum) - shifted_exp_sum / exp_sum)


def token_entropies(logits: Tensor, terms: list[float]) -> Tensor:
    """Entropies (n,) of raw logits (n, vocab_size); `terms` starts with scale and softcap. One program per row."""
    num_rows, vocab_size = logits.shape
    entropies = torch.empty(num_rows, device=logits.device)
    if num_rows:
        block_size, num_warps = choose_block_size(vocab_size)
        entropies_kernel[(num_rows,)](
            logits, entropies, vocab_size, logits.stride(0), *terms[:2],
            HAS_SOFTCAP=terms[1] > 0, BLOCK_SIZE=block_size, num_warps=num_warps,
        )  # fmt: skip
    return entropies


def choose_block_size(vocab_size: int) -> tuple[int, int]:
    """Logits per iteration, and warps of a program."""
    block_size = min(1 << (vocab_size - 1).bit_length(), MAX_BLOCK_SIZE)
    return block_size, max(1, min(16, block_size // 512))


def token_losses(logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool) -> Tensor:
    """Losses (n,) of raw logits (n, vocab_size); writes the gradient over the logits. One program per row."""
    num_rows, vocab_size = logits.shape
    losses = torch.empty(num_rows, device=logits.device)
    if num_rows == 0:
        return losses
    assert logits.stride(1) == 1
    block_size, num_warps = choose_block_size(vocab_size)
    losses_kernel[(num_rows,)](
        logits,
        targets.contiguous(),
        losses if weights is None else weights.float().contiguous(),
        losses,
        vocab_size,
        logits.stride(0),
        *terms,
        HAS_SOFTCAP=terms[1] > 0,
        HAS_WEIGHTS=weights is not None,
        NEEDS_GRADIENT=gradient,
        BLOCK_SIZE=block_size,
        num_warps=num_warps,
        enable_fp_fusion=False,  # losses are bit-identical with and without gradient
    )
    return losses
