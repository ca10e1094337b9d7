"""State space model of Mamba 2 (arXiv:2405.21060): linear attention with a decaying state of fixed size."""

import torch
from torch import Tensor

from tunekit.kernels.gated_delta_rule import chunk_decays, join_chunks, join_documents, split_chunks
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.torch_compile import disable_compile


@disable_compile  # the number of chunks differs from batch to batch, and each would cause a recompilation
def state_space_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    layout: SequenceLayout | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, S, H, V) and final states (B, H, K, V), both in fp32.

    S_t = exp(decay_t) S_{t-1} + k_t v_t^T and o_t = S_t^T q_t, for a state S (K, V) per head. In Mamba 2, q is C, k is
    B, v is the input times its step size. Queries and keys (B, S, G, K) are shared by H / G neighboring heads; values
    are (B, S, H, V), decay (B, S, H) <= 0. The initial state is `state` or zero. `layout` bounds documents in the
    flattened (B * S) tokens; each starts with a zero state, and the final state is that of the last document.
    """
    rows, groups = v.shape[:2], (k.shape[2], -1)
    if layout is not None:
        assert state is None
        decay, q, k, v = join_documents(layout, decay, q, k, v)
    q, k, values, decay = q.float(), k.float(), v.float().unflatten(2, groups), decay.float().unflatten(2, groups)
    if state is None:
        state = values.new_zeros(len(values), v.shape[2], k.shape[-1], v.shape[-1])
    solve = recurrent if v.shape[1] == 1 else chunked
    y, state = solve(q, k, values, decay, state.unflatten(1, groups))
    return y.reshape(*rows, *v.shape[2:]), state.flatten(1, 2)


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Recurrent form, one token at a time: the reference, used for generation.

    Values are (B, S, G, R, V) for R heads to a key, decay is (B, S, G, R), states (B, G, R, K, V).
    """
    outputs = []
    for qt, kt, vt, decay_t in zip(*(x.unbind(1) for x in (q, k, v, decay.exp())), strict=True):
        state = state * decay_t[..., None, None] + torch.einsum("bgk,bgrv->bgrkv", kt, vt)
        outputs.append(torch.einsum("bgk,bgrkv->bgrv", qt, state))
    return torch.stack(outputs, dim=1), state


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Chunked form: attention inside of all chunks at once, and a loop over the states between them."""
    length = v.shape[1]
    q, k, v, decay = (split_chunks(x) for x in (q[:, :, :, None], k[:, :, :, None], v, decay))
    decay_between, decay_from_start, decay_to_end = chunk_decays(decay)
    states = [state]
    for chunk_decay, update in zip(
        decay_from_start[..., -1:, :].unbind(1), (k.mT @ (decay_to_end * v)).unbind(1), strict=True
    ):
        states.append(torch.addcmul(update, chunk_decay, states[-1]))
    states_before = torch.stack(states[:-1], dim=1)
    outputs = (q @ k.mT * decay_between) @ v + decay_from_start * (q @ states_before)
    return join_chunks(outputs, length), states[-1]
