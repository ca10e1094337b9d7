"""Head and loss together, a chunk of tokens at a time: the logits of a step never exist as a whole."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Measure = Callable[[Tensor, Tensor], Tensor]  # fp32 logits (n, vocab) and targets (n,) to a sum

LOGITS = 2**25  # in one chunk, at most
MULTIPLE = 256  # tokens: every step has another number of them, and kernels are made anew for every other shape


def chunked_loss(hidden: Tensor, targets: Tensor, head: nn.Module, vocab: int, measure: Measure) -> Tensor:
    """Sum of `measure(head(h), t)` over tokens: `hidden` (N, dim), `targets` (N,), none of them ignored.

    Gradients are taken chunk by chunk in the forward pass, while the logits are at hand, so nothing is computed twice
    and the head may be anything: plain, adapted, four bits. A frozen head costs no gradient of its own.
    """
    size = max(MULTIPLE, LOGITS // vocab // MULTIPLE * MULTIPLE)
    # A function is told of gradients that nobody will ask for: validation would take those of the head.
    trained = [p for p in head.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    return ChunkedLoss.apply(head, measure, size, targets, hidden, *trained)


class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: nn.Module, measure: Measure, size: int, targets: Tensor, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        wanted = any(ctx.needs_input_grad)
        grads = [torch.empty_like(hidden), *(torch.zeros_like(p) for p in trained)] if wanted else []
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            with torch.set_grad_enabled(wanted):
                h = hidden[part].detach().requires_grad_(wanted)
                loss = measure(padded(head, h).float(), targets[part])
            total += loss.detach()
            if wanted:
                first, *others = torch.autograd.grad(loss, (h, *trained))
                grads[0][part] = first
                for grad, other in zip(grads[1:], others, strict=True):
                    grad += other
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(scaled(grad, scale[0]) for grad in ctx.saved_tensors)


def padded(head: nn.Module, hidden: Tensor) -> Tensor:
    """Logits (n, vocab) of `hidden` (n, dim), made for a rounder number of tokens."""
    count = len(hidden)
    return head(F.pad(hidden, (0, 0, 0, -count % MULTIPLE)))[:count]


def scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """`grad` times `scale` in place. The scale stays fp32: rounded to bf16, it would be off alike for every token."""
    for part in grad.split(4096):
        part.copy_(part.float().mul_(scale))
    return grad
