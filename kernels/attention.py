"""Softmax attention: causal, sliding window, chunked, over packed documents, and against a KV cache. Always exact."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tunekit.kernels import attention_cpu, attention_gpu
from tunekit.kernels.attention_choice import needs_expanded_kv
from tunekit.kernels.attention_gpu import split_chunks
from tunekit.kernels.fake_mode import device_type
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.torch_compile import disable_compile

HEAD_DIM_MULTIPLE = 8  # GPU kernels need head dims that are a multiple of this
BLOCK = 256  # queries per block where scores are materialized: memory grows with S * BLOCK


@dataclass(frozen=True)
class AttentionParams:
    """Scale, mask and softcap of attention scores."""

    scale: float
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it
    chunk: int | None = None  # a token attends only to its own chunk of `chunk` positions
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)

    def to_list(self) -> list[float]:
        """Scale, window, chunk and softcap, as the operators take them; 0: none."""
        return [self.scale, float(self.window or 0), float(self.chunk or 0), self.softcap or 0.0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    layout: SequenceLayout | None = None,
    sinks: Tensor | None = None,
    key_index: Tensor | None = None,
) -> Tensor:
    """Causal attention of (B, S, H, D) queries on (B, S, H_kv, D) keys and (B, S, H_kv, D_v) values: (B, S, H, D_v).

    softmax(scale * q k^T + mask) v per head. `layout` bounds the documents in the flattened (B * S) tokens, which do
    not attend to each other; without it each row is one document. `sinks` (H,) are scores that add to the softmax
    denominator only. `key_index` are the tokens that documents attend to, if these are more than their own: see
    `SequenceLayout.key_index`. Their gradients are summed over documents.
    """
    if key_index is not None:
        k, v = (x.flatten(0, 1).index_select(0, key_index)[None] for x in (k, v))
    if attention_gpu.is_supported(q, params.softcap is not None):
        return attention_gpu.attention_gpu(q, k, v, params.to_list(), layout, sinks)
    if attention_cpu.is_supported(q):
        return attention_cpu.attention_cpu(q, k, v, params.to_list(), layout, sinks)
    if layout is not None:
        return attention_per_document(q, k, v, params, layout.cu_seqlens, sinks, layout.key_cu_seqlens)
    if params.chunk is not None and params.chunk < q.shape[1]:
        return attention_per_document(q, k, v, params, torch.arange(len(q) + 1) * q.shape[1], sinks)
    return causal_attention(q, k, v, params, sinks)


# In this module, queries belong to the last keys if there are more keys than queries.
@disable_compile  # bounds differ from batch to batch, and each set of them would be compiled separately
def attention_per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    key_cu_seqlens: Tensor | None = None,
) -> Tensor:
    """One call per document, or chunk of one: compute grows with the sum of squared lengths, without a mask."""
    key_cu_seqlens = cu_seqlens if key_cu_seqlens is None else key_cu_seqlens
    lengths, key_lengths = (at.diff().tolist() for at in split_chunks(cu_seqlens, key_cu_seqlens, params.chunk or 0))
    documents = (
        x.flatten(0, 1).split(lengths_of_x) for x, lengths_of_x in ((q, lengths), (k, key_lengths), (v, key_lengths))
    )
    outputs = [
        causal_attention(q[None], k[None], v[None], params, sinks)[0]
        for q, k, v in zip(*documents, strict=True)
        if len(q)  # no query attends to the first chunks of a long prefix
    ]
    return torch.cat(outputs).unflatten(0, q.shape[:2])


def causal_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    is_windowed = params.window is not None and params.window < k.shape[1]
    if params.softcap is not None or is_windowed or k.shape[1] > q.shape[1]:
        return blockwise_attention(q, k, v, params, sinks)
    if sinks is None:
        return sdpa(q, k, v, params.scale, causal=True)
    # The sink is the first key, so a dummy first query keeps the causal diagonal in place.
    padded_q = F.pad(q, (0, 0, 0, 0, 1, 0))
    return sdpa(*add_sink_slot(padded_q, k, v, params.scale, sinks), params.scale, causal=True)[:, 1:]


@disable_compile  # the number of blocks depends on the length
def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Attention by blocks of queries on their visible keys: memory grows linearly with S."""
    length = k.shape[1]
    window, num_prefix_keys = length if params.window is None else params.window, length - q.shape[1]
    size = BLOCK if params.softcap is not None else min(max(window, BLOCK // 2), 4 * BLOCK)
    block_fn = attend_block
    # The backward pass recomputes scores with a softcap, and masks of keys before all queries: those of all blocks
    # together would be an S x K matrix.
    if torch.is_grad_enabled() and (params.softcap is not None or num_prefix_keys):
        block_fn = partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False)
    outputs = []
    for start in range(num_prefix_keys, length, size):
        first, last = max(0, start - window + 1), min(start + size, length)
        block = q[:, start - num_prefix_keys : last - num_prefix_keys]
        outputs.append(block_fn(block, k[:, first:last], v[:, first:last], params, window, sinks))
    return torch.cat(outputs, dim=1)


def attend_block(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, window: int, sinks: Tensor | None) -> Tensor:
    """Attention of the queries that belong to the last keys."""
    key = torch.arange(k.shape[1], device=q.device)
    distance = key[k.shape[1] - q.shape[1] :, None] - key
    return masked_attention(q, k, v, params, (distance >= 0) & (distance < window), sinks)


def find_visible_slots(positions: Tensor, num_slots: int, params: AttentionParams) -> Tensor:
    """Mask (B, 1, S, num_slots) of the cache slots that queries at `positions` (B, S) attend to. Slot = position."""
    query, slot = positions[:, None, :, None], torch.arange(num_slots, device=positions.device)
    mask = slot <= query
    if params.window is not None:
        mask &= query - slot < params.window
    if params.chunk is not None:
        mask &= query // params.chunk == slot // params.chunk
    return mask


def attend_slots(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams, sinks: Tensor | None
) -> Tensor:
    """Queries (B, 1, H, D) on those slots (B, K, H_kv, D) of a cache that are `seen` (B, 1, 1, K)."""
    if sinks is None:
        # Query heads of one key head become rows of one matmul: 31 instead of 69 us for 9 query and 3 key heads.
        grouped_q = q[:, 0].unflatten(1, (k.shape[2], -1)).transpose(1, 2)
        return masked_attention(grouped_q, k, v, params, mask, None).transpose(1, 2).flatten(1, 2)[:, None]
    return masked_attention(q, k, v, params, mask, sinks)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """Attention with a boolean mask (..., S, K), True for visible keys."""
    if sinks is not None:
        assert params.softcap is None, "softcap would apply to the sink as well"
        q, k, v = add_sink_slot(q, k, v, params.scale, sinks)
        mask = F.pad(mask, (1, 0), value=True)
    if params.softcap is None:
        return sdpa(q, k, v, params.scale, mask=mask)
    return softcapped_attention(q, k, v, params.scale, params.softcap, mask)


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, mask: Tensor) -> Tensor:
    """Attention with softcapped scores in fp32. The scores are materialized; no fused torch kernel supports softcap."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q = q.unflatten(1, (k.shape[1], -1))  # (B, H_kv, queries of a key, S, D)
    scores = (q @ k.mT[:, :, None]).float() * (scale / softcap)
    probabilities = (scores.tanh() * softcap).masked_fill(~mask.unsqueeze(-3), float("-inf")).softmax(-1)
    return (probabilities.type_as(v) @ v[:, :, None]).flatten(1, 2).transpose(1, 2)


def add_sink_slot(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prepend a key with the sink as score and a zero value.

    An additional channel, in which only this key is nonzero, produces the score. Kernels and gradients need no changes.
    """
    width = q.shape[-1]
    padding = HEAD_DIM_MULTIPLE - width % HEAD_DIM_MULTIPLE
    channel = (sinks.float() / scale).type_as(q)[:, None].expand(*q.shape[:-1], 1)
    k = F.pad(k, (0, padding, 0, 0, 1, 0))
    k[:, 0, :, width] = 1.0
    return F.pad(torch.cat([q, channel], dim=-1), (0, padding - 1)), k, F.pad(v, (0, 0, 0, 0, 1, 0))


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    v_dim = v.shape[-1]
    if v_dim < q.shape[-1]:  # fused kernels need equal head dims of q, k and v
        v = F.pad(v, (0, q.shape[-1] - v_dim))
    if device_type(q) == "cuda":
        q, k, v = prepare_cuda_sdpa(q, k, v, has_mask=mask is not None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)[..., :v_dim]


def prepare_cuda_sdpa(q: Tensor, k: Tensor, v: Tensor, has_mask: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Convert the inputs to a form that a fused kernel supports, to avoid the fallback to S x S scores in fp32.

    Repeats key heads if the kernel does not support GQA, and pads head dims to the alignment of all CUDA kernels.
    """
    padding = -q.shape[-1] % HEAD_DIM_MULTIPLE
    if padding:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    width = max(q.shape[-1], v.shape[-1])
    if q.shape[2] != k.shape[2] and needs_expanded_kv(q.device, q.dtype, width, has_mask):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return q, k, v
