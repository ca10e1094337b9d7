"""Softmax attention: causal, sliding window, chunked, over packed documents, and against a KV cache. Always exact."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tunekit.kernels import attention_cpu, attention_gpu
from tunekit.kernels.attention_choice import device_type, needs_expanded_kv_on
from tunekit.kernels.attention_ranges import attend_segments, find_segments
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout
from tunekit.kernels.shared_prefix import PrefixIndex, SharedPrefixKV
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
    prefixes: SharedPrefixKV | None = None,
) -> Tensor:
    """Causal attention of (B, S, H, D) queries on (B, S, H_kv, D) keys and (B, S, H_kv, D_v) values: (B, S, H, D_v).

    softmax(scale * q k^T + mask) v per head. `layout` bounds the documents in the flattened (B * S) tokens, which do
    not attend to each other; without it each row is one document. `sinks` (H,) are scores that add to the softmax
    denominator only. `prefixes` are the keys of documents with shared prefixes, which attend to these too.
    """
    if prefixes is not None:
        k, v = prefixes.gather(k), prefixes.gather(v)
    if attention_gpu.is_supported(q, params.softcap is not None):
        return attention_gpu.attention_gpu(q, k, v, params.to_list(), layout, sinks)
    cu_seqlens = None if layout is None else layout.cu_seqlens
    key_cu_seqlens = None if prefixes is None else prefixes.cu_seqlens
    if attention_cpu.is_supported(q):
        return attention_cpu.attention_cpu(q, k, v, params.to_list(), cu_seqlens, sinks, key_cu_seqlens)
    if cu_seqlens is None:
        return attention_per_chunk(q, k, v, params, sinks)
    return attention_per_document(q, k, v, params, cu_seqlens, sinks, key_cu_seqlens)


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
    """One call per document: compute grows with the sum of squared lengths, without a mask."""
    lengths, key_lengths = (
        at.diff().tolist() for at in (cu_seqlens, cu_seqlens if key_cu_seqlens is None else key_cu_seqlens)
    )
    documents = (
        x.flatten(0, 1).split(lengths_of_x) for x, lengths_of_x in ((q, lengths), (k, key_lengths), (v, key_lengths))
    )
    outputs = [
        attention_per_chunk(q[None], k[None], v[None], params, sinks)[0] for q, k, v in zip(*documents, strict=True)
    ]
    return torch.cat(outputs).unflatten(0, q.shape[:2])


def attention_per_chunk(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Attention within chunks, as if these were documents. Chunks before the first query are skipped."""
    if params.chunk is None or params.chunk >= k.shape[1]:
        return causal_attention(q, k, v, params, sinks)
    num_prefix_keys = k.shape[1] - q.shape[1]
    num_unseen = num_prefix_keys - num_prefix_keys % params.chunk
    keys, values = (x[:, num_unseen:].split(params.chunk, dim=1) for x in (k, v))
    chunk_sizes = [chunk.shape[1] for chunk in keys]
    chunk_sizes[0] -= num_prefix_keys - num_unseen
    chunks = zip(q.split(chunk_sizes, dim=1), keys, values, strict=True)
    return torch.cat([causal_attention(q, k, v, params, sinks) for q, k, v in chunks], dim=1)


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
    outputs = []
    for start in range(num_prefix_keys, length, size):
        first, last = max(0, start - window + 1), min(start + size, length)
        distance = torch.arange(start, last, device=q.device)[:, None] - torch.arange(first, last, device=q.device)
        mask = (distance >= 0) & (distance < window)
        block = q[:, start - num_prefix_keys : last - num_prefix_keys]
        outputs.append(masked_attention(block, k[:, first:last], v[:, first:last], params, mask, sinks))
    return torch.cat(outputs, dim=1)


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


@disable_compile  # the number of blocks depends on the length
def attention_sharded(  # noqa: PLR0913 (as `attention`, plus the positions of the queries)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    positions: Tensor,
    ranges: Sequence[range],
    sinks: Tensor | None = None,
    prefixes: PrefixIndex | None = None,
    layout: SequenceLayout | None = None,
) -> Tensor:
    """Attention of queries (B, S, H, D) from ranges of each row, on keys and values (B, K, ...) of full rows.

    `positions` (B, S) of the queries start at 0 in each document. Queries after the last key are padding. Works by
    blocks of queries, so memory grows linearly with S. On a GPU, `layout` bounds the documents in the full rows;
    without it each row is one document.
    """
    if prefixes is None and attention_gpu.is_supported(q, params.softcap is not None):
        return attend_ranges(q, k, v, params, ranges, sinks, layout)
    # The masks of all blocks would take a byte per pair of tokens, so the backward pass recomputes them.
    recompute = partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False)
    block_fn, outputs, done = recompute if torch.is_grad_enabled() else attend_block, [], 0
    for query_range in ranges:
        for start in range(0, len(query_range), BLOCK):
            block = query_range[start : start + BLOCK]
            span = slice(done, done := done + len(block))
            block_prefixes = None if prefixes is None else PrefixIndex(*(x[:, span] for x in prefixes))
            outputs.append(block_fn(q[:, span], k, v, params, positions[:, span], block, sinks, block_prefixes))
    return torch.cat(outputs, dim=1)


def attend_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    ranges: Sequence[range],
    sinks: Tensor | None,
    layout: SequenceLayout | None,
) -> Tensor:
    """`attention_sharded` by kernels for packed documents, without masks."""
    shape, device = (k.shape[0], k.shape[1]), q.device
    layout = rows_layout(*shape) if layout is None else layout
    window = 0 if params.window is None or params.chunk is not None else params.window
    key = "segments", shape, *((query_range.start, query_range.stop) for query_range in ranges), window, device
    segments = layout.derive(key, lambda: find_segments(layout.cu_seqlens, shape, ranges, window, device))

    def fused(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        return attention_gpu.attention_gpu(q, k, v, params.to_list(), layout, sinks)

    return attend_segments(q, k, v, segments, fused)


def attend_block(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    positions: Tensor,
    block: range,
    sinks: Tensor | None,
    prefixes: PrefixIndex | None,
) -> Tensor:
    """Attention of one block of queries, the tokens `block` of each row."""
    reach = positions if params.chunk is None else positions % params.chunk  # distance to the oldest visible key
    reach = reach if params.window is None else reach.clamp(max=params.window - 1)
    last = min(block.stop, k.shape[1])
    first = (
        0 if params.window is None or prefixes is not None else max(0, min(block.start, last - 1) - params.window + 1)
    )
    query = torch.arange(block.start, block.stop, device=q.device).clamp(max=k.shape[1] - 1)[:, None]
    key = torch.arange(first, last, device=q.device)
    if prefixes is None:
        mask = (key <= query) & (key >= query - reach[:, None, :, None])
    else:
        positions, reach, count, prefix_start = (x[:, None, :, None] for x in (positions, reach, *prefixes))
        mask = (key <= query) & (key >= query - torch.minimum(reach, positions - count))
        mask |= (key >= prefix_start + positions - reach) & (key < prefix_start + count)
    return masked_attention(q, k[:, first:last], v[:, first:last], params, mask, sinks)


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
    if not torch.is_grad_enabled():
        return softcapped_attention(q, k, v, params.scale, params.softcap, mask)
    # The backward pass recomputes the scores: those of all blocks together are an S x S matrix.
    args = q, k, v, params.scale, params.softcap, mask
    return checkpoint(softcapped_attention, *args, use_reentrant=False, preserve_rng_state=False)


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
    if q.shape[2] != k.shape[2] and needs_expanded_kv_on(q.device, q.dtype, width, has_mask):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return q, k, v
