"""Attention on a GPU: FlashAttention over all documents at once, and FlexAttention for what it cannot do.

Bounds of documents stay on the CPU and are copied to the device once a pass: nothing waits for the device.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from tunekit.devices import capabilities
from tunekit.kernels.attention_choice import (
    HALF_DTYPES,
    AttentionBackend,
    AttentionCall,
    choose_attention_backend,
    get_capabilities,
)
from tunekit.kernels.attention_native import flat, keep
from tunekit.kernels.compiler import constant, uncompiled

NARROWEST, ALIGNED = 16, 8  # channels: the least, and a multiple, of kernels on a GPU
BLOCK = 128  # queries, and keys, of a block of FlexAttention
HALVES = HALF_DTYPES
Bounds = tuple[Tensor, int, Tensor, int]  # of queries and of keys, and the longest stretch between two of them
# What was made of bounds for the layers of a pass, as long as the bounds live.
MADE = WeakIdKeyDictionary()


@constant
def has_flash_lse(device: torch.device) -> bool:
    """Whether the log-sum-exp of FlashAttention has the layout that sinks need."""
    return capabilities(device).flash_lse


def fits(q: Tensor) -> bool:
    """Whether FlashAttention or FlexAttention takes packed documents of these queries."""
    return q.device.type == "cuda" and has_packed_kernel(q.device, q.dtype, q.shape[-1])


@constant
def has_packed_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    call = AttentionCall("cuda", dtype, head_dim, get_capabilities(device), is_packed=True)
    return choose_attention_backend(call) is not AttentionBackend.PER_DOCUMENT


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: list[float],
    offsets: Tensor | None,
    sinks: Tensor | None,
    key_offsets: Tensor | None = None,
) -> Tensor:
    """Causal attention (B, S, H, D_v). `rule`: scale, window, chunk and softcap; 0 says that there is none.

    `key_offsets` bound the keys of documents that have more of them than queries, which are those of the last keys.
    """
    bounds = rows_of(*q.shape[:2]) if offsets is None else offsets
    width = v.shape[-1]
    most = max(NARROWEST, -(-max(q.shape[-1], width) // ALIGNED) * ALIGNED)
    q, k, v = (x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    if q.dtype in HALVES and not rule[3] and (sinks is None or has_flash_lse(q.device)):
        return flash(q, k, v, bounds, sinks, rule, key_offsets)[0][..., :width]
    return flex(q, k, v, bounds, sinks, rule, key_offsets)[..., :width]


@lru_cache(maxsize=16)
def rows_of(rows: int, length: int) -> Tensor:
    """Every row is a document. The same tensor each time: what is made of it is kept."""
    return torch.arange(rows + 1, dtype=torch.int32) * length


def kept(offsets: Tensor, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What `make` gives, made once for these bounds."""
    if offsets not in MADE:
        MADE[offsets] = {}
    made = MADE[offsets]
    if key not in made:
        made[key] = make()
    return made[key]


def cut(offsets: Tensor, key_offsets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Bounds of the queries and of the keys of documents, and of the chunks in them."""
    if not chunk:
        return offsets, key_offsets
    lengths = key_offsets.diff()
    lacking = lengths - offsets.diff()
    parts = -(-lengths // chunk)
    first = (parts.cumsum(0) - parts).repeat_interleave(parts)
    begins = chunk * (torch.arange(len(first)) - first)  # keys of the document before each chunk of it
    queries = (begins - lacking.repeat_interleave(parts)).clamp(min=0)
    pairs = (offsets, queries), (key_offsets, begins)
    found = (torch.cat([at[:-1].repeat_interleave(parts) + more, at[-1:]]).to(at.dtype) for at, more in pairs)
    return next(found), next(found)


def placed(offsets: Tensor, key_offsets: Tensor, chunk: int, device: torch.device) -> Bounds:
    """Bounds of queries and of keys on the device."""

    def make() -> Bounds:
        (q, longest), (k, most) = ((at.int(), int(at.diff().max())) for at in cut(offsets, key_offsets, chunk))
        return q.to(device, non_blocking=True), longest, k.to(device, non_blocking=True), most

    return kept(key_offsets, ("bounds", chunk, device), make)


# ---- FlashAttention ----
# torch.nn.attention.varlen_attn calls the same two, but its arguments differ between 2.11 and 2.13, and the gradient
# of its log-sum-exp, which sinks want, is lost. Where a document has more keys than queries, theirs are the last ones:
# the diagonal ends at the bottom right.


def reach(window: int) -> dict[str, int]:
    """How far a query sees, behind it and before it."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, rule: list[float]) -> tuple[Tensor, Tensor]:
    """Attention (T, H, D) and the log-sum-exp (H, T) of flat documents."""
    at, longest, key_at, most = bounds
    scale, window = rule[0], int(rule[1])
    y, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, at, key_at, longest, most, 0.0, not window, False, scale=scale, **reach(window)
    )
    return y, lse


def backward(grad: Tensor, saved: list[Tensor], bounds: Bounds, rule: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of flat queries, keys and values; `saved`: these, attention and its log-sum-exp."""
    at, longest, key_at, most = bounds
    scale, window = rule[0], int(rule[1])
    seed = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, of which there is none
    unused = torch.empty(0, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad, *saved, at, key_at, longest, most, 0.0, not window, seed, unused, scale=scale, **reach(window)
    )


@torch.library.custom_op("tunekit::flash", mutates_args=())
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    sinks: Tensor | None,
    rule: list[float],
    key_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention (B, S, H, D), and the log-sum-exp (H, B * S) with the sinks in it."""
    bounds = placed(offsets, offsets if key_offsets is None else key_offsets, int(rule[2]), q.device)
    y, lse = forward(flat(q), flat(k), flat(v), bounds, rule)
    if sinks is not None:
        sink = sinks.float()[:, None]
        y = (y * (lse - sink).sigmoid().T[..., None]).type_as(y)
        lse = torch.logaddexp(lse, sink)
    return y.view_as(q), lse


@torch.library.custom_op("tunekit::flash_back", mutates_args=())
def flash_back(grad: Tensor, saved: list[Tensor], rule: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and sinks; `saved` is what `keep` keeps."""
    q, k, v, offsets, key_offsets, y, lse, *sinks = saved
    bounds = placed(offsets, key_offsets, int(rule[2]), q.device)
    # With the sink in the log-sum-exp the kernel makes shares that add up to less than 1: all that it must know.
    given = [*(flat(x) for x in (q, k, v, y)), lse]
    made = backward(flat(grad.contiguous()), given, bounds, rule)
    dq, dk, dv = (x.view(like.shape) for x, like in zip(made, (q, k, v), strict=True))
    if not sinks:
        return dq, dk, dv, q.new_empty(0)
    delta = (grad.float() * y.float()).sum(-1).flatten().view(-1, len(lse)).T
    to_sinks = -((sinks[0].float()[:, None] - lse).exp() * delta).sum(1)
    return dq, dk, dv, to_sinks.type_as(sinks[0])


@flash.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    sinks: Tensor | None,
    rule: list[float],
    key_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(heads, rows * length, dtype=torch.float32)


@flash_back.register_fake
def _(grad: Tensor, saved: list[Tensor], rule: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, _, _, _, _, *sinks = saved
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, sinks[0].new_empty(sinks[0].shape) if sinks else q.new_empty(0)


def back(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, to_sinks = flash_back(grad, list(ctx.saved_tensors), ctx.rule)
    return dq, dk, dv, None, to_sinks if ctx.sunk else None, None, None


flash.register_autograd(back, setup_context=keep)


# ---- FlexAttention ----


@cache
def compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@uncompiled  # it is compiled apart: what it is given is made on the CPU
def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    sinks: Tensor | None,
    rule: list[float],
    key_offsets: Tensor | None = None,
) -> Tensor:
    """Causal attention (B, S, H, D), with a cap on the scores."""
    scale, window, chunk, softcap = rule
    keys = offsets if key_offsets is None else key_offsets
    key = window, chunk, q.device
    mask = kept(keys, key, lambda: blocks(*cut(offsets, keys, int(chunk)), int(window), q.device))
    flat = [x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]
    options = {"score_mod": capped(softcap) if softcap else None, "block_mask": mask, "scale": scale}
    y, aux = compiled()(*flat, **options, enable_gqa=q.shape[2] != k.shape[2], return_aux=AuxRequest(lse=True))
    if sinks is not None:
        y = (y * (aux.lse - sinks.float()[:, None]).sigmoid()[..., None]).type_as(y)
    return y[0].transpose(0, 1).reshape(q.shape)


@cache
def capped(softcap: float) -> Callable[..., Tensor]:
    def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score


def blocks(bounds: Tensor, key_bounds: Tensor, window: int, device: torch.device) -> BlockMask:
    """Which blocks of keys each block of queries sees, and which of these whole, from bounds alone: never all pairs."""
    tokens, keys = int(bounds[-1]), int(key_bounds[-1])
    lengths = bounds.diff()
    # The last key of a query, and the oldest one: both grow from one query to the next.
    newest = torch.arange(tokens) + (key_bounds[1:] - bounds[1:]).repeat_interleave(lengths).long()
    oldest = key_bounds[:-1].repeat_interleave(lengths).long()
    if window:
        oldest = torch.maximum(oldest, newest - window + 1)
    rows, columns = -(-tokens // BLOCK), torch.arange(-(-keys // BLOCK))
    first, last = torch.arange(rows) * BLOCK, (torch.arange(1, rows + 1) * BLOCK).clamp(max=tokens) - 1
    seen = (columns >= oldest[first, None] // BLOCK) & (columns <= newest[last, None] // BLOCK)
    begins = columns * BLOCK
    whole = seen & (begins >= oldest[last, None]) & (begins + BLOCK - 1 <= newest[first, None])
    listed = [x for part in (seen & ~whole, whole) for x in indices(part)]
    partly, partly_at, wholly, wholly_at = (x[None, None].to(device, non_blocking=True) for x in listed)
    visible = seen_by(*(x.int().to(device, non_blocking=True) for x in (oldest, newest)))
    return BlockMask.from_kv_blocks(
        partly, partly_at, wholly, wholly_at, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(tokens, keys)
    )


def indices(seen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the columns of each row are seen, and which: these first."""
    return seen.sum(1, dtype=torch.int32), seen.int().argsort(dim=1, descending=True, stable=True).int()


def seen_by(oldest: Tensor, newest: Tensor) -> Callable[..., Tensor]:
    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= newest[query]) & (key >= oldest[query])

    return seen
