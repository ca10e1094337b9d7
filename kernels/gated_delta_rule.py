"""Gated delta rule (linear attention with a state of fixed size), and the short convolution before it."""

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
from tunekit.kernels.prefix_sum import prefix_sum
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.torch_compile import disable_compile
from tunekit.kernels.triton_support import uses_triton

CHUNK = 64  # maximum tokens per chunk


class Bounds(NamedTuple):
    """Document bounds on the device, for the convolution and the delta rule."""

    offsets: Tensor  # (documents + 1,), int32
    starts: Tensor  # (documents - 1,) first tokens of all documents except the first one
    padded_index: Tensor  # (T,) index of each token if `width` zeros precede each document
    output_index: Tensor  # (T,) padded_index - width: index of each token in the output of the convolution


def get_bounds(layout: SequenceLayout, width: int, device: torch.device) -> Bounds:
    """Bounds of the documents of a layout on a device, copied once per pass without synchronization."""

    def build() -> Bounds:
        offsets = layout.cu_seqlens
        document = torch.arange(1, len(offsets), device=offsets.device).repeat_interleave(offsets.diff().long())
        index = width * document + torch.arange(len(document), device=offsets.device)
        tensors = offsets.to(torch.int32), offsets[1:-1].to(torch.int64), index, index - width
        return Bounds(*(copy_to_device(x, device) for x in tensors))

    return layout.derive(("bounds of the delta rule", width, device), build)


@disable_compile  # the number of chunks differs from batch to batch, and each would cause a recompilation
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    layout: SequenceLayout | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule (arXiv:2412.06464): outputs (B, S, H, V) and final states (B, H, K, V) in fp32.

    S_t = exp(decay_t) S_{t-1} + k_t (beta_t (v_t - exp(decay_t) S_{t-1}^T k_t))^T and o_t = S_t^T q_t / sqrt(K), for a
    state S (K, V) per head. Queries and keys (B, S, H_k, K) are L2-normalized and shared by H / H_k neighboring heads;
    values are (B, S, H, V), decay and beta (B, S, H). The initial state is `state` or zero. `layout` bounds documents
    in the flattened (B * S) tokens; each starts with a zero state, and the final state is that of the last document.
    """
    if (fla := find_fla()) is not None and is_supported_by_fla(v):
        return run_fla(fla, (q, k, v, decay, beta), layout, state)
    rows, groups = v.shape[:2], (k.shape[2], -1)
    if layout is not None:
        assert state is None
        decay, q, k, v, beta = join_documents(layout, decay, q, k, v, beta)
    q, k = normalize(q) * q.shape[-1] ** -0.5, normalize(k)
    values, decay, beta = (x.float().unflatten(2, groups) for x in (v, decay, beta))
    if state is None:
        state = values.new_zeros(len(values), v.shape[2], k.shape[-1], v.shape[-1])
    solve = recurrent if v.shape[1] == 1 else chunked if fake_mode.device_type(v) == "cpu" else batched
    y, state = solve(q, k, values, decay, beta, state.unflatten(1, groups))
    return y.reshape(*rows, *v.shape[2:]).type_as(v), state.flatten(1, 2)


def join_documents(layout: SequenceLayout, decay: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Decay (B, S, ...) and other inputs as one row. The decay resets the state at the start of each document."""
    starts = get_bounds(layout, 0, decay.device).starts
    decay, *others = (x.flatten(0, 1)[None] for x in (decay, *inputs))
    return decay.float().index_fill(1, starts, float("-inf")), *others


@cache
def find_fla() -> Callable[..., Any] | None:
    """The kernel of flash-linear-attention, if it is installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (ImportError, AttributeError, RuntimeError):  # its dependencies have incompatible versions
        return None


def is_supported_by_fla(v: Tensor) -> bool:
    """Whether flash-linear-attention supports these values. It requires Triton, half precision and several tokens."""
    return v.dtype in HALF_DTYPES and v.shape[1] > 1 and uses_triton(v)


def run_fla(
    kernel: Callable[..., Any], inputs: tuple[Tensor, ...], layout: SequenceLayout | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` by flash-linear-attention, which computes a state per document. Returns the last state."""
    v = inputs[2]
    if layout is not None:
        assert state is None
        inputs = tuple(x.flatten(0, 1)[None] for x in inputs)
    q, k, values, decay, beta = inputs
    # Versions up to 0.2 do not support heads that share a key.
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    y, states = kernel(
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
    return y.view_as(v), states if layout is None else states[-1:]


def normalize(x: Tensor) -> Tensor:
    """L2-normalize the last axis, in fp32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Recurrent form, one token at a time: the reference, used for generation.

    Values are (B, S, H_k, R, V) for R heads to a key, decay and beta (B, S, H_k, R), states (B, H_k, R, K, V).
    """
    outputs = []
    for qt, kt, vt, decay_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, decay.exp(), beta)), strict=True):
        state = state * decay_t[..., None, None]
        prediction = torch.einsum("bhk,bhrkv->bhrv", kt, state)
        state = state + torch.einsum("bhk,bhrv->bhrkv", kt, (vt - prediction) * beta_t[..., None])
        outputs.append(torch.einsum("bhk,bhrkv->bhrv", qt, state))
    return torch.stack(outputs, dim=1), state


class Chunks(NamedTuple):
    """Chunks (B, N, H_k, R, C, ...) and the parts of their solution that do not depend on the state."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay_from_start: Tensor  # (..., C, 1) decay of the state from the start of the chunk to each token
    decay_to_end: Tensor  # (..., C, 1) decay from each token to the end of the chunk
    inverse: Tensor  # (..., C, C) inverse of the triangular system
    scores: Tensor  # (..., C, C) scores of queries for their own and earlier keys of the chunk


def solve_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Chunks:
    """State-independent part of the chunked form (arXiv:2406.06484)."""
    # Token i adds k_i u_i' to the state, and u_i = b_i (v_i - f_i S'k_i - sum over j < i of f_i / f_j (k_i . k_j) u_j),
    # where S is the state before the chunk and f_i its decay up to token i: a triangular system for all u of the chunk.
    q, k, v, decay, beta = (split_chunks(x) for x in (q[:, :, :, None], k[:, :, :, None], v, decay, beta))
    decay_between, decay_from_start, decay_to_end = chunk_decays(decay)
    inverse = unit_lower_inverse(k @ k.mT * decay_between * beta[..., None]) * beta[..., None, :]
    return Chunks(q, k, v, decay_from_start, decay_to_end, inverse, q @ k.mT * decay_between)


def chunk_decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decays inside of chunks (..., C): from token to token (..., C, C), from the start and to the end (..., C, 1).

    Those from token j to token i are summed from j to i: the difference of two cumulative sums would be NaN for -inf
    and inaccurate for small values after large ones.
    """
    size = decay.shape[-1]
    is_past = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril(-1)
    between = prefix_sum(decay[..., None].where(is_past, 0).mT).mT.exp().tril()
    return between, prefix_sum(decay).exp()[..., None], between[..., -1, :, None]


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Chunked form, one chunk at a time.

    On one core with gradients, 2,048 tokens of 32 heads took 0.85 s and 512 tokens 0.3 s; the recurrent form took
    4.2 s, the torch path of transformers 3.3 s and 0.35 s (benchmarks/gated_delta_rule.py).
    """
    chunks = (x.unbind(1) for x in solve_chunks(q, k, v, decay, beta))
    outputs = []
    for qn, kn, vn, decay_from_start, decay_to_end, inverse, scores in zip(*chunks, strict=True):
        u = inverse @ (vn - decay_from_start * (kn @ state))
        outputs.append(decay_from_start * (qn @ state) + scores @ u)
        state = decay_from_start[..., -1:, :] * state + kn.mT @ (decay_to_end * u)
    return join_chunks(torch.stack(outputs, dim=1), v.shape[1]), state


def batched(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Chunked form, all chunks at once: one kernel per chunk and direction instead of about twenty.

    Slower on a CPU, where the matrices do not fit into the cache: 2.4 s instead of 1.3 s for 2,048 tokens of 32 heads.
    """
    # WY form: u = U - W S is linear in the state S before the chunk, and so is the state M S + N after it.
    length, chunks = v.shape[1], solve_chunks(q, k, v, decay, beta)
    q, k, v, decay_from_start, decay_to_end, inverse, scores = chunks
    u, w, keys = inverse @ v, inverse @ (decay_from_start * k), (decay_to_end * k).mT
    identity = torch.eye(k.shape[-1], device=k.device, dtype=k.dtype)
    states = ChunkStates.apply(decay_from_start[..., -1:, :] * identity - keys @ w, keys @ u, state)
    states_before = states[:, :-1]
    outputs = torch.addcmul(scores @ (u - w @ states_before), decay_from_start, q @ states_before)
    return join_chunks(outputs, length), states[:, -1].clone()  # a view would keep the states of all chunks


class ChunkStates(torch.autograd.Function):
    """States (B, N + 1, ..., K, V) before each chunk and after the last one: S' = M S + N, one matmul per chunk.

    `transition` M is (B, N, ..., K, K), `addend` N is (B, N, ..., K, V), `initial` is the first state (B, ..., K, V).
    """

    @staticmethod
    def forward(ctx: Any, transition: Tensor, addend: Tensor, initial: Tensor) -> Tensor:
        num_chunks, shape = transition.shape[1], initial.shape
        states = addend.new_empty(num_chunks + 1, *shape)
        states[0] = initial
        steps = zip(unbind_chunks(transition), unbind_chunks(addend), strict=True)
        for i, (m, n) in enumerate(steps):
            torch.baddbmm(n, m, states[i].flatten(0, -3), out=states[i + 1].flatten(0, -3))
        states = states.movedim(0, 1)
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        transition, states = ctx.saved_tensors
        grad_states = grads[0].movedim(1, 0).contiguous()
        total_grad = torch.empty_like(grad_states)
        total_grad[-1] = grad_states[-1]
        for i, m in reversed([*enumerate(unbind_chunks(transition))]):
            next_grad, out = total_grad[i + 1].flatten(0, -3), total_grad[i].flatten(0, -3)
            torch.baddbmm(grad_states[i].flatten(0, -3), m.mT, next_grad, out=out)
        grad_addend = total_grad[1:].movedim(0, 1)
        return grad_addend @ states[:, :-1].mT, grad_addend, total_grad[0]


def unbind_chunks(x: Tensor) -> list[Tensor]:
    """Split (B, N, ..., rows, columns) into matrices (batch, rows, columns), one per chunk."""
    return [chunk.flatten(0, -3) for chunk in x.unbind(1)]


def split_chunks(x: Tensor) -> Tensor:
    """Split (B, S, H_k, R, ...) into chunks (B, N, H_k, R, C, ...) of equal size, padded with zeros at the end."""
    num_chunks = -(-x.shape[1] // CHUNK)
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % num_chunks))
    return padded.unflatten(1, (num_chunks, -1)).movedim(2, 4)


def join_chunks(x: Tensor, length: int) -> Tensor:
    """Join chunks (B, N, H_k, R, C, V) to (B, S, H_k, R, V), without padding."""
    return x.movedim(4, 2).flatten(1, 2)[:, :length]


def unit_lower_inverse(x: Tensor) -> Tensor:
    """Inverse of I + tril(x, -1)."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve_triangular(x, identity, upper=False, unitriangular=True)


def short_convolution(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    layout: SequenceLayout | None = None,
    previous: Tensor | None = None,
    bias: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """Causal depthwise convolution, by default with SiLU: x (B, S, C), weight (C, K) with the tap of the current token
    last, bias (C,).

    `previous` (B, K - 1, C) are the tokens before the rows, by default zeros. The convolution does not cross the
    documents of `layout`.
    """
    width, activation = weight.shape[-1] - 1, F.silu if silu else torch.Tensor.contiguous
    if layout is None:
        padded = F.pad(x, (0, 0, width, 0)) if previous is None else torch.cat([previous, x], dim=1)
        return activation(convolve(padded, weight, bias)).type_as(x)
    bounds = get_bounds(layout, width, x.device)  # with `width` zeros before each document
    padded = x.new_zeros(1, x.shape[0] * x.shape[1] + width * (len(layout.cu_seqlens) - 1), x.shape[-1])
    padded = padded.index_copy(1, bounds.padded_index, x.flatten(0, 1)[None])
    return activation(convolve(padded, weight, bias).index_select(1, bounds.output_index)).view_as(x).type_as(x)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise convolution (B, S, C) of `x` (B, S + K - 1, C) without padding, in fp32."""
    first_tap, *other_taps = weight.float().unbind(-1)
    length = x.shape[1] - len(other_taps)
    y = x[:, :length] * first_tap
    y = y if bias is None else y + bias.float()
    for i, tap in enumerate(other_taps, start=1):
        y = torch.addcmul(y, x[:, i : i + length], tap)
    return y
