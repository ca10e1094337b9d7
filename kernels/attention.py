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

ALIGNED = 8  # channels: kernels on a GPU want a multiple
BLOCK = 256  # queries at once where scores must be written down: memory grows with S * BLOCK


@dataclass(frozen=True)
class AttentionParams:
    """Which keys a query sees, and what happens to its scores."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a token sees only its own stretch of `chunk` positions
    softcap: float | None = None  # scores are kept within this by tanh

    def numbers(self) -> list[float]:
        """All of it as numbers; 0 says that there is none."""
        return [self.scale, float(self.window or 0), float(self.chunk or 0), self.softcap or 0.0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionParams,
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
        k, v = prefixes.take(k), prefixes.take(v)
    if attention_gpu.is_supported(q, rule.softcap is not None):
        return attention_gpu.attention_gpu(q, k, v, rule.numbers(), layout, sinks)
    offsets = None if layout is None else layout.cu_seqlens
    bounds = None if prefixes is None else prefixes.offsets
    if attention_cpu.is_supported(q):
        return attention_cpu.attention_cpu(q, k, v, rule.numbers(), offsets, sinks, bounds)
    if offsets is None:
        return chunked(q, k, v, rule, sinks)
    return packed(q, k, v, rule, offsets, sinks, bounds)


# Where there are more keys than queries, these are those of the last keys, here and below.
@disable_compile  # the bounds differ in every batch, and each set of them would compile anew
def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionParams,
    offsets: Tensor,
    sinks: Tensor | None,
    key_offsets: Tensor | None = None,
) -> Tensor:
    """One product per document: the work is the sum of the squared lengths, and no mask exists."""
    lengths, keys = (at.diff().tolist() for at in (offsets, offsets if key_offsets is None else key_offsets))
    each = (x.flatten(0, 1).split(sizes) for x, sizes in ((q, lengths), (k, keys), (v, keys)))
    parts = [chunked(q[None], k[None], v[None], rule, sinks)[0] for q, k, v in zip(*each, strict=True)]
    return torch.cat(parts).unflatten(0, q.shape[:2])


def chunked(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Chunks are finer documents. Of those that no query sees there is nothing to do."""
    if rule.chunk is None or rule.chunk >= k.shape[1]:
        return causal(q, k, v, rule, sinks)
    lacking = k.shape[1] - q.shape[1]
    unseen = lacking - lacking % rule.chunk
    keys, values = (x[:, unseen:].split(rule.chunk, dim=1) for x in (k, v))
    sizes = [part.shape[1] for part in keys]
    sizes[0] -= lacking - unseen
    parts = zip(q.split(sizes, dim=1), keys, values, strict=True)
    return torch.cat([causal(q, k, v, rule, sinks) for q, k, v in parts], dim=1)


def causal(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, sinks: Tensor | None) -> Tensor:
    cut = rule.window is not None and rule.window < k.shape[1]
    if rule.softcap is not None or cut or k.shape[1] > q.shape[1]:
        return banded(q, k, v, rule, sinks)
    if sinks is None:
        return sdpa(q, k, v, rule.scale, causal=True)
    # The slot of the sink comes first, so a query in front of the others moves the diagonal to where it belongs.
    first = F.pad(q, (0, 0, 0, 0, 1, 0))
    return sdpa(*sunk(first, k, v, rule.scale, sinks), rule.scale, causal=True)[:, 1:]


@disable_compile  # the number of blocks differs with the length
def banded(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, sinks: Tensor | None) -> Tensor:
    """A block of queries at a time, on the keys that it can see: memory grows with S and not its square."""
    length = k.shape[1]
    window, lacking = length if rule.window is None else rule.window, length - q.shape[1]
    size = BLOCK if rule.softcap is not None else min(max(window, BLOCK // 2), 4 * BLOCK)
    out = []
    for start in range(lacking, length, size):
        first, last = max(0, start - window + 1), min(start + size, length)
        age = torch.arange(start, last, device=q.device)[:, None] - torch.arange(first, last, device=q.device)
        seen = (age >= 0) & (age < window)
        some = q[:, start - lacking : last - lacking]
        out.append(masked(some, k[:, first:last], v[:, first:last], rule, seen, sinks))
    return torch.cat(out, dim=1)


def find_visible_slots(positions: Tensor, num_slots: int, rule: AttentionParams) -> Tensor:
    """Slots that queries at `positions` (B, S) see, (B, 1, S, num_slots); the index of a slot is its position."""
    at, slot = positions[:, None, :, None], torch.arange(num_slots, device=positions.device)
    seen = slot <= at
    if rule.window is not None:
        seen &= at - slot < rule.window
    if rule.chunk is not None:
        seen &= at // rule.chunk == slot // rule.chunk
    return seen


def attend_slots(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Queries (B, 1, H, D) on those slots (B, K, H_kv, D) of a cache that are `seen` (B, 1, 1, K)."""
    if sinks is None:
        # Queries on the same keys as rows of one product: 31 microseconds and not 69 for nine heads on three of keys.
        rows = q[:, 0].unflatten(1, (k.shape[2], -1)).transpose(1, 2)
        return masked(rows, k, v, rule, seen, None).transpose(1, 2).flatten(1, 2)[:, None]
    return masked(q, k, v, rule, seen, sinks)


@disable_compile  # the number of blocks differs with the length
def attention_sharded(  # noqa: PLR0913 (as `attend`, and where the queries are)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionParams,
    positions: Tensor,
    stretches: Sequence[range],
    sinks: Tensor | None = None,
    prefixes: PrefixIndex | None = None,
    layout: SequenceLayout | None = None,
) -> Tensor:
    """The same for queries (B, S, H, D) of some stretches of each row, on keys and values (B, K, ...) of whole rows.

    `positions` (B, S) of the queries count from 0 in each document. Behind the last key there may be queries that
    nobody asks. A block of queries at a time: memory grows with S and not its square. On a GPU documents are taken from
    `layout`, which bounds them in the full rows; without it every row is one document.
    """
    if prefixes is None and attention_gpu.is_supported(q, rule.softcap is not None):
        return attend_ranges(q, k, v, rule, stretches, sinks, layout)
    # Masks of all blocks together would be as many bytes as there are pairs of tokens: they are made again.
    again = partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False)
    work, out, done = again if torch.is_grad_enabled() else attend_block, [], 0
    for stretch in stretches:
        for at in range(0, len(stretch), BLOCK):
            some = stretch[at : at + BLOCK]
            here = slice(done, done := done + len(some))
            before = None if prefixes is None else PrefixIndex(*(x[:, here] for x in prefixes))
            out.append(work(q[:, here], k, v, rule, positions[:, here], some, sinks, before))
    return torch.cat(out, dim=1)


def attend_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionParams,
    ranges: Sequence[range],
    sinks: Tensor | None,
    layout: SequenceLayout | None,
) -> Tensor:
    """The same by kernels for packed documents, without masks."""
    shape, device = (k.shape[0], k.shape[1]), q.device
    layout = rows_layout(*shape) if layout is None else layout
    window = 0 if rule.window is None or rule.chunk is not None else rule.window
    key = "segments", shape, *((some.start, some.stop) for some in ranges), window, device
    segments = layout.derive(key, lambda: find_segments(layout.cu_seqlens, shape, ranges, window, device))

    def fused(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        return attention_gpu.attention_gpu(q, k, v, rule.numbers(), layout, sinks)

    return attend_segments(q, k, v, segments, fused)


def attend_block(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionParams,
    positions: Tensor,
    some: range,
    sinks: Tensor | None,
    prefixes: PrefixIndex | None,
) -> Tensor:
    """One block of queries, the tokens `some` of each row."""
    behind = positions if rule.chunk is None else positions % rule.chunk  # how far back a query sees
    behind = behind if rule.window is None else behind.clamp(max=rule.window - 1)
    last = min(some.stop, k.shape[1])
    first = 0 if rule.window is None or prefixes is not None else max(0, min(some.start, last - 1) - rule.window + 1)
    query = torch.arange(some.start, some.stop, device=q.device).clamp(max=k.shape[1] - 1)[:, None]
    key = torch.arange(first, last, device=q.device)
    if prefixes is None:
        seen = (key <= query) & (key >= query - behind[:, None, :, None])
    else:
        positions, behind, count, begin = (x[:, None, :, None] for x in (positions, behind, *prefixes))
        seen = (key <= query) & (key >= query - torch.minimum(behind, positions - count))
        seen |= (key >= begin + positions - behind) & (key < begin + count)
    return masked(q, k[:, first:last], v[:, first:last], rule, seen, sinks)


def masked(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Queries on those keys that are `seen` (..., S, K)."""
    if sinks is not None:
        assert rule.softcap is None, "a sink would be capped too"
        q, k, v = sunk(q, k, v, rule.scale, sinks)
        seen = F.pad(seen, (1, 0), value=True)
    if rule.softcap is None:
        return sdpa(q, k, v, rule.scale, mask=seen)
    if not torch.is_grad_enabled():
        return capped(q, k, v, rule.scale, rule.softcap, seen)
    # Scores are made again in the backward pass: those of all blocks together would be S x S numbers.
    args = q, k, v, rule.scale, rule.softcap, seen
    return checkpoint(capped, *args, use_reentrant=False, preserve_rng_state=False)


def capped(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, seen: Tensor) -> Tensor:
    """Scores within `softcap`, which no fused kernel of torch can do, written down in fp32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q = q.unflatten(1, (k.shape[1], -1))  # (B, H_kv, queries of a key, S, D)
    scores = (q @ k.mT[:, :, None]).float() * (scale / softcap)
    shares = (scores.tanh() * softcap).masked_fill(~seen.unsqueeze(-3), float("-inf")).softmax(-1)
    return (shares.type_as(v) @ v[:, :, None]).flatten(1, 2).transpose(1, 2)


def sunk(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A slot in front of the others, whose score is the sink of each head and whose value is nothing.

    The score comes from a channel more, in which only that key is not zero. So it is a plain product for the kernels,
    and its gradient too.
    """
    width = q.shape[-1]
    more = ALIGNED - width % ALIGNED
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
    more = -q.shape[-1] % ALIGNED
    if more:
        q, k, v = (F.pad(x, (0, more)) for x in (q, k, v))
    width = max(q.shape[-1], v.shape[-1])
    if q.shape[2] != k.shape[2] and needs_expanded_kv_on(q.device, q.dtype, width, has_mask):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return q, k, v
