"""The gated delta rule, a state of fixed size in place of keys and values, and the short convolution before it."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.devices import HALF_DTYPES
from tunekit.kernels import fake_mode
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.torch_compile import disable_compile
from tunekit.kernels.triton_support import uses_triton

CHUNK = 64  # tokens that are solved for together, at most


class Bounds(NamedTuple):
    """Packed documents on the device, as the convolution and the rule read them."""

    offsets: Tensor  # (documents + 1,), int32
    starts: Tensor  # (documents - 1,) first tokens of all documents but the first
    gather_index: Tensor  # (T,) of each token among tokens with `width` zeros in front of each document
    before: Tensor  # (T,) the same less `width`


def get_bounds(layout: SequenceLayout, width: int, device: torch.device) -> Bounds:
    """Bounds of the documents of a layout on a device. The host does not wait for it, and copies once per pass."""

    def build() -> Bounds:
        offsets = layout.cu_seqlens
        document = torch.arange(1, len(offsets), device=offsets.device).repeat_interleave(offsets.diff().long())
        index = width * document + torch.arange(len(document), device=offsets.device)
        tensors = offsets.to(torch.int32), offsets[1:-1].to(torch.int64), index, index - width
        return Bounds(*(copy_to_device(x, device) for x in tensors))

    return layout.derive(("bounds of the delta rule", width, device), build)


@disable_compile  # the number of chunks differs from batch to batch, and each would compile anew
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    layout: SequenceLayout | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States that learn what values belong to keys (arXiv:2412.06464): answers (B, S, H, V) and the last states.

    At every token the state (K, V) of a head fades by exp(decay), then what it says to the key moves towards the value
    by the share `beta`, and what it says to the query is the answer. Queries and keys (B, S, H_k, K) are brought to
    length 1 and serve H / H_k neighbouring heads each; decay and beta are (B, S, H). States (B, H, K, V) are fp32, and
    zero at first or `state`. `layout` bounds documents in the flattened (B * S) tokens, each of which begins with a
    state of zeros; the last state is then that of the last document.
    """
    if (fla := find_fla()) is not None and is_supported_by_fla(v):
        return run_fla(fla, (q, k, v, decay, beta), layout, state)
    rows, groups = v.shape[:2], (k.shape[2], -1)
    if layout is not None:
        assert state is None
        q, k, v, decay, beta = (x.flatten(0, 1)[None] for x in (q, k, v, decay, beta))
        starts = get_bounds(layout, 0, decay.device).starts
        decay = decay.float().index_fill(1, starts, float("-inf"))  # what was before is forgotten
    q, k = normalize(q) * q.shape[-1] ** -0.5, normalize(k)
    values, decay, beta = (x.float().unflatten(2, groups) for x in (v, decay, beta))
    if state is None:
        state = values.new_zeros(len(values), v.shape[2], k.shape[-1], v.shape[-1])
    rule = recurrent if v.shape[1] == 1 else chunked if fake_mode.device_type(v) == "cpu" else batched
    y, state = rule(q, k, values, decay, beta, state.unflatten(1, groups))
    return y.reshape(*rows, *v.shape[2:]).type_as(v), state.flatten(1, 2)


@cache
def find_fla() -> Callable[..., Any] | None:
    """The rule of flash-linear-attention, if it is installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (ImportError, AttributeError, RuntimeError):  # for another version of one of its own dependencies
        return None


def is_supported_by_fla(v: Tensor) -> bool:
    """Whether its kernels take these values. They are Triton's, refuse fp32, and single tokens are a recurrence."""
    return v.dtype in HALF_DTYPES and v.shape[1] > 1 and uses_triton(v)


def run_fla(
    rule: Callable[..., Any], inputs: tuple[Tensor, ...], layout: SequenceLayout | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """gated_delta_rule by flash-linear-attention. Each of its documents has a state; the last one is returned."""
    v = inputs[2]
    if layout is not None:
        assert state is None
        inputs = tuple(x.flatten(0, 1)[None] for x in inputs)
    q, k, values, decay, beta = inputs
    # Versions up to 0.2 know no heads that share a key.
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    y, last = rule(
        q,
        k,
        values,
        g=decay.float(),
        beta=beta.type_as(v),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if layout is None else get_bounds(layout, 0, v.device).offsets.long(),
    )
    return y.view_as(v), last if layout is None else last[-1:]


def normalize(x: Tensor) -> Tensor:
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


class Chunks(NamedTuple):
    """Chunks (B, N, H_k, R, C, ...) and the solution of each, before a state is known."""

    q: Tensor
    k: Tensor
    v: Tensor
    remaining: Tensor  # (..., C, 1) of the state before the chunk, at each token
    to_end: Tensor  # (..., C, 1) of each token, after the chunk
    solution: Tensor  # (..., C, C)
    inside: Tensor  # (..., C, C) scores of queries for earlier keys of the chunk


def solve_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Chunks:
    """The part of the chunked form (arXiv:2406.06484) that is the same for every state."""
    # Token i adds k_i u_i' to the state, and u_i = b_i (v_i - f_i S'k_i - sum over j < i of f_i / f_j (k_i . k_j) u_j),
    # where f_i is what fading has left of S, the state before the chunk: a triangular system for all u of it.
    q, k, v, decay, beta = (split_chunks(x) for x in (q[:, :, :, None], k[:, :, :, None], v, decay, beta))
    # What is left at token i of what came at j. Sums from j to i, for a difference of two sums from the start knows no
    # -inf, and loses what is small behind what is large.
    past = torch.ones(v.shape[-2], v.shape[-2], dtype=torch.bool, device=v.device).tril(-1)
    left = decay[..., None].where(past, 0).cumsum(-2).exp().tril()
    solution = unit_lower_inverse(k @ k.mT * left * beta[..., None]) * beta[..., None, :]
    remaining, to_end = decay.cumsum(-1).exp()[..., None], left[..., -1, :, None]
    return Chunks(q, k, v, remaining, to_end, solution, q @ k.mT * left)


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same a chunk at a time. With gradients, 2048 tokens of 32 heads took a core 0.85 s, and 512 took 0.3 s;
    token by token 4.2 s; transformers' torch path 3.3 s and 0.35 s (benchmarks/delta.py).
    """
    parts = (x.unbind(1) for x in solve_chunks(q, k, v, decay, beta))
    answers = []
    for qn, kn, vn, keep, end, solve, within in zip(*parts, strict=True):
        u = solve @ (vn - keep * (kn @ state))
        answers.append(keep * (qn @ state) + within @ u)
        state = keep[..., -1:, :] * state + kn.mT @ (end * u)
    return join_chunks(torch.stack(answers, dim=1), v.shape[1]), state


def batched(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same for all chunks at once: one kernel for each chunk and direction instead of some twenty.

    A CPU is slower with it: 2.4 s instead of 1.3 s for 2048 tokens of 32 heads, whose matrices leave the cache.
    """
    # The WY form: u is linear in the state before the chunk, u = U - W S, and so is the state after it, M S + N.
    length, (q, k, v, remaining, to_end, solution, inside) = v.shape[1], solve_chunks(q, k, v, decay, beta)
    u, w, keys = solution @ v, solution @ (remaining * k), (to_end * k).mT
    identity = torch.eye(k.shape[-1], device=k.device, dtype=k.dtype)
    states = ChunkStates.apply(remaining[..., -1:, :] * identity - keys @ w, keys @ u, state)
    before = states[:, :-1]
    answers = torch.addcmul(inside @ (u - w @ before), remaining, q @ before)
    return join_chunks(answers, length), states[:, -1].clone()  # a view would keep the states of all chunks


class ChunkStates(torch.autograd.Function):
    """States (B, N + 1, ..., K, V) before each chunk and after the last: S' = M S + N, one product for each chunk.

    `transition` M is (B, N, ..., K, K), `added` N is (B, N, ..., K, V), the first state (B, ..., K, V).
    """

    @staticmethod
    def forward(ctx: Any, transition: Tensor, added: Tensor, first: Tensor) -> Tensor:
        count, shape = transition.shape[1], first.shape
        states = added.new_empty(count + 1, *shape)
        states[0] = first
        steps = zip(unbind_chunks(transition), unbind_chunks(added), strict=True)
        for i, (m, n) in enumerate(steps):
            torch.baddbmm(n, m, states[i].flatten(0, -3), out=states[i + 1].flatten(0, -3))
        states = states.movedim(0, 1)
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        transition, states = ctx.saved_tensors
        direct = grads[0].movedim(1, 0).contiguous()
        to_states = torch.empty_like(direct)
        to_states[-1] = direct[-1]
        for i, m in reversed([*enumerate(unbind_chunks(transition))]):
            later, earlier = to_states[i + 1].flatten(0, -3), to_states[i].flatten(0, -3)
            torch.baddbmm(direct[i].flatten(0, -3), m.mT, later, out=earlier)
        to_added = to_states[1:].movedim(0, 1)
        return to_added @ states[:, :-1].mT, to_added, to_states[0]


def unbind_chunks(x: Tensor) -> list[Tensor]:
    """Matrices (batch, rows, columns) of each chunk of (B, N, ..., rows, columns)."""
    return [part.flatten(0, -3) for part in x.unbind(1)]


def split_chunks(x: Tensor) -> Tensor:
    """Chunks (B, N, H_k, R, C, ...) of (B, S, H_k, R, ...), of one size: zeros stand behind the last token."""
    count = -(-x.shape[1] // CHUNK)
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % count))
    return padded.unflatten(1, (count, -1)).movedim(2, 4)


def join_chunks(x: Tensor, length: int) -> Tensor:
    """(B, S, H_k, R, V) of chunks (B, N, H_k, R, C, V), without what fills the last one."""
    return x.movedim(4, 2).flatten(1, 2)[:, :length]


def unit_lower_inverse(x: Tensor) -> Tensor:
    """The inverse of 1 + x, of which what lies below the diagonal counts."""
    one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve_triangular(x, one, upper=False, unitriangular=True)


def short_convolution(
    x: Tensor, weight: Tensor, layout: SequenceLayout | None = None, before: Tensor | None = None
) -> Tensor:
    """silu of each channel's sum over this and the last tokens: x (B, S, C), weight (C, K), nearest last.

    `before` (B, K - 1, C) came before the rows; no document that `layout` bounds sees another.
    """
    width = weight.shape[-1] - 1
    if layout is None:
        padded = F.pad(x, (0, 0, width, 0)) if before is None else torch.cat([before, x], dim=1)
        return F.silu(convolve(padded, weight)).type_as(x)
    bounds = get_bounds(layout, width, x.device)  # zeros stand before every document
    padded = x.new_zeros(1, x.shape[0] * x.shape[1] + width * (len(layout.cu_seqlens) - 1), x.shape[-1])
    padded = padded.index_copy(1, bounds.gather_index, x.flatten(0, 1)[None])
    return F.silu(convolve(padded, weight).index_select(1, bounds.before)).view_as(x).type_as(x)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Sums (B, S, C) over the windows of `x` (B, S + K - 1, C), in fp32."""
    first, *others = weight.float().unbind(-1)
    length = x.shape[1] - len(others)
    y = x[:, :length] * first
    for i, part in enumerate(others, start=1):
        y = torch.addcmul(y, x[:, i : i + length], part)
    return y
