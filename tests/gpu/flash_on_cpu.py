"""The FlashAttention operators of torch for CPU tensors, in float64, as the CUDA kernels are specified."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def visible_keys(
    num_queries: int, num_keys: int, is_causal: bool, window_left: int | None, window_right: int | None
) -> Tensor:
    """Keys that each query sees, (num_queries, num_keys). Diagonals end at the bottom right."""
    age = torch.arange(num_queries)[:, None] + (num_keys - num_queries) - torch.arange(num_keys)
    right = 0 if is_causal else window_right
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if right is not None and right >= 0:
        seen &= age >= -right
    if window_left is not None and window_left >= 0:
        seen &= age <= window_left
    return seen


def forward(  # noqa: PLR0913 (arguments of the operator)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Documents of q (T, H, D) on those of k and v (T_k, H_kv, D); `seqused_k` shortens the latter."""
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0 and q.shape[2] <= 256
    assert cum_q.dtype == cum_k.dtype == torch.int32 and len(cum_q) == len(cum_k)
    assert seqused_k is None or (seqused_k.dtype == torch.int32 and seqused_k.is_contiguous())
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    groups = q.shape[1] // k.shape[1]
    for i in range(len(cum_q) - 1):
        at = slice(int(cum_q[i]), int(cum_q[i + 1]))
        length = int(cum_k[i + 1] - cum_k[i] if seqused_k is None else seqused_k[i])
        assert at.stop - at.start <= max_q and 0 < length <= max_k
        keys = slice(int(cum_k[i]), int(cum_k[i]) + length)
        kd, vd = (x[keys].double().repeat_interleave(groups, dim=1) for x in (k, v))
        seen = visible_keys(at.stop - at.start, length, is_causal, window_size_left, window_size_right)
        scores = torch.einsum("qhd,khd->hqk", q[at].double(), kd) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), vd).type_as(q)
        lse[:, at] = scores.logsumexp(-1).float()
    empty = torch.empty(0)
    return out, lse, empty, empty, empty


def backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Probabilities are those that the log-sum-exp leaves."""
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    for i in range(len(cum_q) - 1):
        at, keys = (slice(int(c[i]), int(c[i + 1])) for c in (cum_q, cum_k))
        qd, gd, yd = (x[at].double() for x in (q, grad, out))
        kd, vd = (x[keys].double().repeat_interleave(groups, dim=1) for x in (k, v))
        seen = visible_keys(len(qd), len(kd), is_causal, window_size_left, window_size_right)
        scores = (torch.einsum("qhd,khd->hqk", qd, kd) * scale).masked_fill(~seen, float("-inf"))
        shares = (scores - lse[:, at, None].double()).exp()
        delta = (gd * yd).sum(-1).T[..., None]
        change = shares * (torch.einsum("qhd,khd->hqk", gd, vd) - delta) * scale
        grads[0][at] = torch.einsum("hqk,khd->qhd", change, kd)
        grads[1][keys] += torch.einsum("hqk,qhd->khd", change, qd).unflatten(1, (-1, groups)).sum(2)
        grads[2][keys] += torch.einsum("hqk,qhd->khd", shares, gd).unflatten(1, (-1, groups)).sum(2)
    dq, dk, dv = (x.type_as(q) for x in grads)
    return dq, dk, dv


class CpuFlash:
    """Registered operators; `remove` takes them back, as torch's registry of implementations asks for it."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", forward, "CPU")
        self.library.impl("_flash_attention_backward", backward, "CPU")

    def remove(self) -> None:
        self.library._destroy()


@contextmanager
def cpu_flash() -> Iterator[None]:
    handle = CpuFlash()
    try:
        yield
    finally:
        handle.remove()
