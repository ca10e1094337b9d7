"""The gated delta rule, a state of fixed size in place of keys and values, and the short convolution before it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.compiler import uncompiled

CHUNK = 64  # tokens that are solved for together, at most


@uncompiled  # the number of chunks differs from batch to batch, and each would compile anew
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    offsets: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States that learn what values belong to keys (arXiv:2412.06464): answers (B, S, H, V) and the last states.

    At every token the state (K, V) of a head fades by exp(decay), then what it says to the key moves towards the value
    by the share `beta`, and what it says to the query is the answer. Queries and keys (B, S, H_k, K) are brought to
    length 1 and serve H / H_k neighbouring heads each; decay and beta are (B, S, H). States (B, H, K, V) are fp32, and
    zero at first or `state`. `offsets` (documents + 1,) bounds documents in the flattened (B * S) tokens, each of which
    begins with a state of zeros; the last state is then that of the last document.
    """
    rows, groups = v.shape[:2], (k.shape[2], -1)
    if offsets is not None:
        assert state is None
        q, k, v, decay, beta = (x.flatten(0, 1)[None] for x in (q, k, v, decay, beta))
        starts = offsets[1:-1].to(decay.device, torch.long)
        decay = decay.float().index_fill(1, starts, float("-inf"))  # what was before is forgotten
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    values, decay, beta = (x.float().unflatten(2, groups) for x in (v, decay, beta))
    if state is None:
        state = values.new_zeros(len(values), v.shape[2], k.shape[-1], v.shape[-1])
    rule = recurrent if v.shape[1] == 1 else chunked
    y, state = rule(q, k, values, decay, beta, state.unflatten(1, groups))
    return y.reshape(*rows, *v.shape[2:]).type_as(v), state.flatten(1, 2)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 in fp32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: the reference, and the way of generation.

    Values are (B, S, H_k, R, V) for R heads to a key, decay and beta (B, S, H_k, R), states (B, H_k, R, K, V).
    """
    answers = []
    for qt, kt, vt, fade, share in zip(*(x.unbind(1) for x in (q, k, v, decay.exp(), beta)), strict=True):
        state = state * fade[..., None, None]
        known = torch.einsum("bhk,bhrkv->bhrv", kt, state)
        state = state + torch.einsum("bhk,bhrv->bhrkv", kt, (vt - known) * share[..., None])
        answers.append(torch.einsum("bhk,bhrkv->bhrv", qt, state))
    return torch.stack(answers, dim=1), state


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same a chunk at a time (arXiv:2406.06484). With gradients, 2048 tokens of 32 heads took a core 0.85 s, and
    512 took 0.3 s; token by token 4.2 s; transformers' torch path 3.3 s and 0.35 s (benchmarks/delta.py).
    """
    # Token i adds k_i u_i' to the state, and u_i = b_i (v_i - f_i S'k_i - sum over j < i of f_i / f_j (k_i . k_j) u_j),
    # where f_i is what fading has left of S, the state before the chunk: a triangular system for all u of it.
    length = v.shape[1]
    q, k, v, decay, beta = (cut(x) for x in (q[:, :, :, None], k[:, :, :, None], v, decay, beta))
    # What is left at token i of what came at j. Sums from j to i, for a difference of two sums from the start knows no
    # -inf, and loses what is small behind what is large.
    past = torch.ones(v.shape[-2], v.shape[-2], dtype=torch.bool, device=v.device).tril(-1)
    left = decay[..., None].where(past, 0).cumsum(-2).exp().tril()
    solution = inverse(k @ k.mT * left * beta[..., None]) * beta[..., None, :]
    inside = q @ k.mT * left
    kept, last = decay.cumsum(-1).exp()[..., None], left[..., -1, :, None]
    answers = []
    parts = (x.unbind(1) for x in (q, k, v, kept, last, solution, inside))
    for qn, kn, vn, keep, end, solve, within in zip(*parts, strict=True):
        u = solve @ (vn - keep * (kn @ state))
        answers.append(keep * (qn @ state) + within @ u)
        state = keep[..., -1:, :] * state + kn.mT @ (end * u)
    return torch.stack(answers, dim=1).movedim(4, 2).flatten(1, 2)[:, :length], state


def cut(x: Tensor) -> Tensor:
    """Chunks (B, N, H_k, R, C, ...) of (B, S, H_k, R, ...), of one size: zeros stand behind the last token."""
    count = -(-x.shape[1] // CHUNK)
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % count))
    return padded.unflatten(1, (count, -1)).movedim(2, 4)


def inverse(x: Tensor) -> Tensor:
    """The inverse of 1 + x, of which what lies below the diagonal counts."""
    one = torch.eye(x.shape[-1], device=x.device)
    return torch.linalg.solve_triangular(x, one, upper=False, unitriangular=True)


def short_convolution(x: Tensor, weight: Tensor, offsets: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """silu of each channel's sum over this and the last tokens: x (B, S, C), weight (C, K), nearest last.

    `before` (B, K - 1, C) came before the rows; no document that `offsets` bounds sees another.
    """
    width = weight.shape[-1] - 1
    if offsets is None:
        padded = F.pad(x, (0, 0, width, 0)) if before is None else torch.cat([before, x], dim=1)
        return F.silu(slide(padded, weight)).type_as(x)
    lengths = offsets.diff()
    gaps = width * torch.arange(1, len(offsets)).repeat_interleave(lengths).to(x.device)
    place = torch.arange(len(gaps), device=x.device) + gaps  # zeros stand before every document
    padded = x.new_zeros(1, len(gaps) + width * len(lengths), x.shape[-1]).index_copy(1, place, x.flatten(0, 1)[None])
    return F.silu(slide(padded, weight)[:, place - width]).view_as(x).type_as(x)


def slide(x: Tensor, weight: Tensor) -> Tensor:
    """Sums (B, S, C) over the windows of `x` (B, S + K - 1, C), in fp32."""
    first, *others = weight.float().unbind(-1)
    length = x.shape[1] - len(others)
    y = x[:, :length] * first
    for i, part in enumerate(others, start=1):
        y = torch.addcmul(y, x[:, i : i + length], part)
    return y
