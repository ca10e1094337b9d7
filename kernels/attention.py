"""Softmax attention: causal, over a window, over packed documents, and against cached keys. Always exact."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees, and what happens to its scores."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a token sees only its own stretch of `chunk` positions
    softcap: float | None = None


def attend(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, offsets: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of (B, S, H, D) queries on (B, S, H_kv, D) keys; returns (B, S, H, D).

    `offsets` (documents + 1,) on the CPU bounds the documents in the flattened (B * S) tokens: none sees another.
    Without it every row is one document.
    """
    if offsets is None:
        return causal(q, k, v, rule.scale, rule.window)
    return packed(q, k, v, rule.scale, rule.window, offsets)


@torch.compiler.disable()  # the bounds differ in every batch, and each set of them would compile anew
def packed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, offsets: Tensor) -> Tensor:
    """One product per document: the work is the sum of the squared lengths, and no mask exists."""
    lengths = offsets.diff().tolist()
    documents = zip(*(x.flatten(0, 1).split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([causal(q[None], k[None], v[None], scale, window)[0] for q, k, v in documents]).view_as(q)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    if window is None or window >= q.shape[1]:
        return sdpa(q, k, v, scale, causal=True)
    return banded(q, k, v, scale, window)


def banded(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Blocks of `window` queries, each on the two blocks of keys it can see: memory grows with S and not its square."""
    out = []
    for start in range(0, q.shape[1], window):
        first, last = max(0, start - window + 1), min(start + window, q.shape[1])
        age = torch.arange(start, last, device=q.device)[:, None] - torch.arange(first, last, device=q.device)
        seen = (age >= 0) & (age < window)
        out.append(sdpa(q[:, start:last], k[:, first:last], v[:, first:last], scale, mask=seen))
    return torch.cat(out, dim=1)


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule, sinks: Tensor | None = None
) -> Tensor:
    """Queries at `positions` (B, S) on the slots (B, K, H_kv, D) of a cache; the index of a slot is its position."""
    age = positions[:, None, :, None] - torch.arange(k.shape[1], device=q.device)
    seen = age >= 0 if rule.window is None else (age >= 0) & (age < rule.window)
    return sdpa(q, k, v, rule.scale, mask=seen)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)
