"""Softmax attention: causal, over a window, in chunks, over packed documents, and against cached keys. Always exact."""

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

HEAD_DIM_MULTIPLE = 8  # channels: kernels on a GPU want a multiple
BLOCK = 256  # queries at once where scores must be written down: memory grows with S * BLOCK


@dataclass(frozen=True)
class AttentionParams:
    """Which keys a query sees, and what happens to its scores."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a token sees only its own stretch of `chunk` positions
    softcap: float | None = None  # scores are kept within this by tanh

    def to_list(self) -> list[float]:
        """All of it as numbers; 0 says that there is none."""
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

    `layout` bounds the documents in the flattened (B * S) tokens: none sees another. Without it every row is one
    document. `sinks` (H,) are scores that take probability and give nothing. Where documents of the layout have
    prefixes, `prefixes` are their keys, which they see too.
    """
    if prefixes is not None:
        k, v = prefixes.gather(k), prefixes.gather(v)
    if attention_gpu.is_supported(q, params.softcap is not None):
        return attention_gpu.attention_gpu(q, k, v, params.to_list(), layout, sinks)
    offsets = None if layout is None else layout.cu_seqlens
    bounds = None if prefixes is None else prefixes.cu_seqlens
    if attention_cpu.is_supported(q):
        return attention_cpu.attention_cpu(q, k, v, params.to_list(), offsets, sinks, bounds)
    if offsets is None:
        return attention_per_chunk(q, k, v, params, sinks)
    return attention_per_document(q, k, v, params, offsets, sinks, bounds)


# Where there are more keys than queries, these are those of the last keys, here and below.
@disable_compile  # the bounds differ in every batch, and each set of them would compile anew
def attention_per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    offsets: Tensor,
    sinks: Tensor | None,
    key_offsets: Tensor | None = None,
) -> Tensor:
    """One product per document: the work is the sum of the squared lengths, and no mask exists."""
    lengths, keys = (at.diff().tolist() for at in (offsets, offsets if key_offsets is None else key_offsets))
    each = (x.flatten(0, 1).split(sizes) for x, sizes in ((q, lengths), (k, keys), (v, keys)))
    parts = [attention_per_chunk(q[None], k[None], v[None], params, sinks)[0] for q, k, v in zip(*each, strict=True)]
    return torch.cat(parts).unflatten(0, q.shape[:2])


def attention_per_chunk(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Chunks are finer documents. Of those that no query sees there is nothing to do."""
    if params.chunk is None or params.chunk >= k.shape[1]:
        return causal_attention(q, k, v, params, sinks)
    lacking = k.shape[1] - q.shape[1]
    unseen = lacking - lacking % params.chunk
    keys, values = (x[:, unseen:].split(params.chunk, dim=1) for x in (k, v))
    sizes = [part.shape[1] for part in keys]
    sizes[0] -= lacking - unseen
    parts = zip(q.split(sizes, dim=1), keys, values, strict=True)
    return torch.cat([causal_attention(q, k, v, params, sinks) for q, k, v in parts], dim=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    cut = params.window is not None and params.window < k.shape[1]
    if params.softcap is not None or cut or k.shape[1] > q.shape[1]:
        return blockwise_attention(q, k, v, params, sinks)
    if sinks is None:
        return sdpa(q, k, v, params.scale, causal=True)
    # The slot of the sink comes first, so a query in front of the others moves the diagonal to where it belongs.
    first = F.pad(q, (0, 0, 0, 0, 1, 0))
    return sdpa(*add_sink_slot(first, k, v, params.scale, sinks), params.scale, causal=True)[:, 1:]


@disable_compile  # the number of blocks differs with the length
def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    """A block of queries at a time, on the keys that it can see: memory grows with S and not its square."""
    length = k.shape[1]
    window, lacking = length if params.window is None else params.window, length - q.shape[1]
    size = BLOCK if params.softcap is not None else min(max(window, BLOCK // 2), 4 * BLOCK)
    out = []
    for start in range(lacking, length, size):
        first, last = max(0, start - window + 1), min(start + size, length)
        age = torch.arange(start, last, device=q.device)[:, None] - torch.arange(first, last, device=q.device)
        seen = (age >= 0) & (age < window)
        some = q[:, start - lacking : last - lacking]
        out.append(masked_attention(some, k[:, first:last], v[:, first:last], params, seen, sinks))
    return torch.cat(out, dim=1)


def find_visible_slots(positions: Tensor, num_slots: int, params: AttentionParams) -> Tensor:
    """Slots that queries at `positions` (B, S) see, (B, 1, S, num_slots); the index of a slot is its position."""
    at, slot = positions[:, None, :, None], torch.arange(num_slots, device=positions.device)
    seen = slot <= at
    if params.window is not None:
        seen &= at - slot < params.window
    if params.chunk is not None:
        seen &= at // params.chunk == slot // params.chunk
    return seen


def attend_slots(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, params: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Queries (B, 1, H, D) on those slots (B, K, H_kv, D) of a cache that are `seen` (B, 1, 1, K)."""
    if sinks is None:
        # Queries on the same keys as rows of one product: 31 microseconds and not 69 for nine heads on three of keys.
        rows = q[:, 0].unflatten(1, (k.shape[2], -1)).transpose(1, 2)
        return masked_attention(rows, k, v, params, seen, None).transpose(1, 2).flatten(1, 2)[:, None]
    return masked_attention(q, k, v, params, seen, sinks)


@disable_compile  # the number of blocks differs with the length
def attention_sharded(  # noqa: PLR0913 (as `attend`, and where the queries are)
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
    """The same for queries (B, S, H, D) of some stretches of each row, on keys and values (B, K, ...) of whole rows.

    `positions` (B, S) of the queries count from 0 in each document. Behind the last key there may be queries that
    nobody asks. A block of queries at a time: memory grows with S and not its square. On a GPU documents are taken from
    `layout`, which bounds them in the full rows; without it every row is one document.
    """
    if prefixes is None and attention_gpu.is_supported(q, params.softcap is not None):
        return attend_ranges(q, k, v, params, ranges, sinks, layout)
    # Masks of all blocks together would be as many bytes as there are pairs of tokens: they are made again.
    again = partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False)
    work, out, done = again if torch.is_grad_enabled() else attend_block, [], 0
    for stretch in ranges:
        for at in range(0, len(stretch), BLOCK):
            some = stretch[at : at + BLOCK]
            here = slice(done, done := done + len(some))
            before = None if prefixes is None else PrefixIndex(*(x[:, here] for x in prefixes))
            out.append(work(q[:, here], k, v, params, positions[:, here], some, sinks, before))
    return torch.cat(out, dim=1)


def attend_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    ranges: Sequence[range],
    sinks: Tensor | None,
    layout: SequenceLayout | None,
) -> Tensor:
    """The same by kernels for packed documents, without masks."""
    shape, device = (k.shape[0], k.shape[1]), q.device
    layout = rows_layout(*shape) if layout is None else layout
    window = 0 if params.window is None or params.chunk is not None else params.window
    key = "segments", shape, *((some.start, some.stop) for some in ranges), window, device
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
    some: range,
    sinks: Tensor | None,
    prefixes: PrefixIndex | None,
) -> Tensor:
    """One block of queries, the tokens `some` of each row."""
    behind = positions if params.chunk is None else positions % params.chunk  # how far back a query sees
    behind = behind if params.window is None else behind.clamp(max=params.window - 1)
    last = min(some.stop, k.shape[1])
    first = 0 if params.window is None or prefixes is not None else max(0, min(some.start, last - 1) - params.window + 1)
    query = torch.arange(some.start, some.stop, device=q.device).clamp(max=k.shape[1] - 1)[:, None]
    key = torch.arange(first, last, device=q.device)
    if prefixes is None:
        seen = (key <= query) & (key >= query - behind[:, None, :, None])
    else:
        positions, behind, count, begin = (x[:, None, :, None] for x in (positions, behind, *prefixes))
        seen = (key <= query) & (key >= query - torch.minimum(behind, positions - count))
        seen |= (key >= begin + positions - behind) & (key < begin + count)
    return masked_attention(q, k[:, first:last], v[:, first:last], params, seen, sinks)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Queries on those keys that are `seen` (..., S, K)."""
    if sinks is not None:
        assert params.softcap is None, "a sink would be capped too"
        q, k, v = add_sink_slot(q, k, v, params.scale, sinks)
        seen = F.pad(seen, (1, 0), value=True)
    if params.softcap is None:
        return sdpa(q, k, v, params.scale, mask=seen)
    if not torch.is_grad_enabled():
        return softcapped_attention(q, k, v, params.scale, params.softcap, seen)
    # Scores are made again in the backward pass: those of all blocks together would be S x S numbers.
    args = q, k, v, params.scale, params.softcap, seen
    return checkpoint(softcapped_attention, *args, use_reentrant=False, preserve_rng_state=False)


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, seen: Tensor) -> Tensor:
    """Scores within `softcap`, which no fused kernel of torch can do, written down in fp32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q = q.unflatten(1, (k.shape[1], -1))  # (B, H_kv, queries of a key, S, D)
    scores = (q @ k.mT[:, :, None]).float() * (scale / softcap)
    shares = (scores.tanh() * softcap).masked_fill(~seen.unsqueeze(-3), float("-inf")).softmax(-1)
    return (shares.type_as(v) @ v[:, :, None]).flatten(1, 2).transpose(1, 2)


def add_sink_slot(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A slot in front of the others, whose score is the sink of each head and whose value is nothing.

    The score comes from a channel more, in which only that key is not zero. So it is a plain product for the kernels,
    and its gradient too.
    """
    width = q.shape[-1]
    more = HEAD_DIM_MULTIPLE - width % HEAD_DIM_MULTIPLE
    channel = (sinks.float() / scale).type_as(q)[:, None].expand(*q.shape[:-1], 1)
    k = F.pad(k, (0, more, 0, 0, 1, 0))
    k[:, 0, :, width] = 1.0
    return F.pad(torch.cat([q, channel], dim=-1), (0, more - 1)), k, F.pad(v, (0, 0, 0, 0, 1, 0))


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    width = v.shape[-1]
    if width < q.shape[-1]:  # the kernels that need little memory want one width for all
        v = F.pad(v, (0, q.shape[-1] - width))
    if device_type(q) == "cuda":
        q, k, v = prepare_cuda_sdpa(q, k, v, has_mask=mask is not None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)[..., :width]


def prepare_cuda_sdpa(q: Tensor, k: Tensor, v: Tensor, has_mask: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Bring a call into a form that a fused kernel takes, so that it never falls back to S x S scores in fp32.

    Heads of keys are repeated where the kernel takes no groups, and channels padded to the alignment that all CUDA
    kernels accept.
    """
    more = -q.shape[-1] % HEAD_DIM_MULTIPLE
    if more:
        q, k, v = (F.pad(x, (0, more)) for x in (q, k, v))
    width = max(q.shape[-1], v.shape[-1])
    if q.shape[2] != k.shape[2] and needs_expanded_kv_on(q.device, q.dtype, width, has_mask):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return q, k, v
