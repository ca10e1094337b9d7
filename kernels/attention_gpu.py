"""Attention on a GPU: FlashAttention over all documents at once, and FlexAttention for what it cannot do.

Bounds of documents stay on the CPU and are copied to the device once a pass: nothing waits for the device.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tunekit.devices import HALF_DTYPES
from tunekit.kernels.attention_choice import (
    AttentionBackend,
    AttentionCall,
    choose_attention_backend,
    get_capabilities,
)
from tunekit.kernels.attention_cpu import flatten_tokens
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout
from tunekit.kernels.torch_compile import assume_constant_result, disable_compile
from tunekit.kernels.triton_support import can_launch

MIN_HEAD_DIM, HEAD_DIM_MULTIPLE = 16, 8  # channels: the least, and a multiple, of kernels on a GPU
BLOCK = 128  # queries, and keys, of a block of FlexAttention
Bounds = tuple[Tensor, int, Tensor, int]  # of queries and of keys, and the longest stretch between two of them
# Queries and keys for which FlexAttention is not compiled where no gradient is needed: it takes 20 to 60 s.
MAX_UNCOMPILED_TOKENS = 2**12
FLEX_VARIANTS = 64  # dtypes, head dims, windows, caps, with and without gradients: each is compiled once


def is_gpu(device: torch.device) -> bool:
    """Whether attention on this device may be that of this module."""
    return device.type == "cuda"


def is_supported(q: Tensor, capped: bool) -> bool:
    """Whether FlashAttention or FlexAttention takes packed documents of these queries, whose scores may be capped."""
    if not is_gpu(q.device):
        return False
    needs_flex = capped or q.dtype == torch.float32
    if needs_flex and not can_launch():
        return False  # FlexAttention is compiled to Triton
    if needs_flex and not torch.is_grad_enabled() and q.shape[0] * q.shape[1] <= MAX_UNCOMPILED_TOKENS:
        return False  # as in the verification of a checkpoint
    return has_packed_kernel(q.device, q.dtype, q.shape[-1])


@assume_constant_result
def has_packed_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    call = AttentionCall("cuda", dtype, head_dim, get_capabilities(device), is_packed=True)
    return choose_attention_backend(call) is not AttentionBackend.PER_DOCUMENT


def attention_gpu(
    q: Tensor, k: Tensor, v: Tensor, params: list[float], layout: SequenceLayout | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention (B, S, H, D_v). `rule`: scale, window, chunk and softcap; 0 says that there is none.

    Where documents of the layout have prefixes, there are more keys than queries, which are those of the last keys.
    """
    layout = rows_layout(*q.shape[:2]) if layout is None else layout
    width = v.shape[-1]
    most = max(MIN_HEAD_DIM, -(-max(q.shape[-1], width) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE)
    q, k, v = (x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    if q.dtype in HALF_DTYPES and not params[3] and (sinks is None or get_capabilities(q.device).flash_lse):
        at, longest, key_at, most_keys = varlen_bounds(layout, int(params[2]), q.device)
        return flash(q, k, v, at, key_at, longest, most_keys, sinks, params)[0][..., :width]
    return flex(q, k, v, layout, sinks, params)[..., :width]


def prepare_layout(
    layout: SequenceLayout | None, shape: torch.Size, chunks: Iterable[int], device: torch.device
) -> SequenceLayout | None:
    """Copy to a GPU what its attention needs to know of documents, before the layers run, which may be compiled.

    Returns the layout with these copies. Without one, each row of tokens of `shape` (B, S) is a document.
    """
    if not is_gpu(device):
        return layout
    layout = rows_layout(*shape) if layout is None else layout
    for chunk in chunks:
        varlen_bounds(layout, chunk, device)
    return layout


def varlen_bounds(layout: SequenceLayout, chunk: int, device: torch.device) -> Bounds:
    """Bounds of queries and of keys on the device, and the longest stretch of each, which the host knows."""
    if (chunk, device) not in layout.varlen_bounds:
        with torch.inference_mode(False):
            layout.varlen_bounds[chunk, device] = copy_bounds(layout.cu_seqlens, layout.key_cu_seqlens, chunk, device)
    return layout.varlen_bounds[chunk, device]


def split_chunks(offsets: Tensor, key_offsets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
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


def copy_bounds(offsets: Tensor, key_offsets: Tensor, chunk: int, device: torch.device) -> Bounds:
    (q, longest), (k, most) = ((at.int(), int(at.diff().max())) for at in split_chunks(offsets, key_offsets, chunk))
    return copy_to_device(q, device), longest, copy_to_device(k, device), most


# ---- FlashAttention ----
# torch.nn.attention.varlen_attn calls the same two, but its arguments differ between 2.11 and 2.13, and the gradient
# of its log-sum-exp, which sinks want, is lost. Where a document has more keys than queries, theirs are the last ones:
# the diagonal ends at the bottom right.


def window_args(window: int) -> dict[str, int]:
    """How far a query sees, behind it and before it."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, params: list[float]) -> tuple[Tensor, Tensor]:
    """Attention (T, H, D) and the log-sum-exp (H, T) of flat documents."""
    at, longest, key_at, most = bounds
    scale, window = params[0], int(params[1])
    y, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, at, key_at, longest, most, 0.0, not window, False, scale=scale, **window_args(window)
    )
    return y, lse


def backward(grad: Tensor, saved: list[Tensor], bounds: Bounds, params: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of flat queries, keys and values; `saved`: these, attention and its log-sum-exp."""
    at, longest, key_at, most = bounds
    scale, window = params[0], int(params[1])
    seed = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, of which there is none
    unused = torch.empty(0, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad, *saved, at, key_at, longest, most, 0.0, not window, seed, unused, scale=scale, **window_args(window)
    )


@torch.library.custom_op("tunekit::flash", mutates_args=())
def flash(  # noqa: PLR0913 (an operator takes no named tuples)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    longest: int,
    most: int,
    sinks: Tensor | None,
    params: list[float],
) -> tuple[Tensor, Tensor]:
    """Causal attention (B, S, H, D), and the log-sum-exp (H, B * S) with the sinks in it.

    Bounds are on the device, so that neither a recomputed layer nor the backward pass copies them again.
    """
    y, lse = forward(
        flatten_tokens(q), flatten_tokens(k), flatten_tokens(v), (cu_seqlens, longest, key_cu_seqlens, most), params
    )
    if sinks is not None:
        sink = sinks.float()[:, None]
        y = (y * (lse - sink).sigmoid().T[..., None]).type_as(y)
        lse = torch.logaddexp(lse, sink)
    return y.view_as(q), lse


@torch.library.custom_op("tunekit::flash_back", mutates_args=())
def flash_back(
    grad: Tensor, saved: list[Tensor], longest: int, most: int, params: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and sinks; `saved` is what `keep` keeps."""
    q, k, v, cu_seqlens, key_cu_seqlens, y, lse, *sinks = saved
    bounds = cu_seqlens, longest, key_cu_seqlens, most
    # With the sink in the log-sum-exp the kernel makes shares that add up to less than 1: all that it must know.
    given = [*(flatten_tokens(x) for x in (q, k, v, y)), lse]
    made = backward(flatten_tokens(grad.contiguous()), given, bounds, params)
    dq, dk, dv = (x.view(like.shape) for x, like in zip(made, (q, k, v), strict=True))
    if not sinks:
        return dq, dk, dv, q.new_empty(0)
    delta = (grad.float() * y.float()).sum(-1).flatten().view(-1, len(lse)).T
    to_sinks = -((sinks[0].float()[:, None] - lse).exp() * delta).sum(1)
    return dq, dk, dv, to_sinks.type_as(sinks[0])


@flash.register_fake
def _(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    longest: int,
    most: int,
    sinks: Tensor | None,
    rule: list[float],
) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(heads, rows * length, dtype=torch.float32)


@flash_back.register_fake
def _(
    grad: Tensor, saved: list[Tensor], longest: int, most: int, params: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, _, _, _, _, *sinks = saved
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, sinks[0].new_empty(sinks[0].shape) if sinks else q.new_empty(0)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, key_cu_seqlens, ctx.longest, ctx.most, sinks, ctx.rule = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_seqlens, key_cu_seqlens, *output, *([] if sinks is None else [sinks]))
    ctx.sunk = sinks is not None


def flash_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, to_sinks = flash_back(grad, list(ctx.saved_tensors), ctx.longest, ctx.most, ctx.rule)
    return dq, dk, dv, None, None, None, None, to_sinks if ctx.sunk else None, None


flash.register_autograd(flash_backward, setup_context=setup_context)


# ---- FlexAttention ----


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Behind the limit of torch, which is 8 variants, FlexAttention would run uncompiled and write all scores down.

    As one graph it fails there, and says so.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, FLEX_VARIANTS)
    return torch.compile(flex_attention, fullgraph=True)


@disable_compile  # it is compiled apart: what it is given is made on the CPU
def flex(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, sinks: Tensor | None, params: list[float]) -> Tensor:
    """Causal attention (B, S, H, D), with a cap on the scores."""
    scale, window, chunk, softcap = params

    def build_mask() -> BlockMask:
        return build_block_mask(*split_chunks(layout.cu_seqlens, layout.key_cu_seqlens, int(chunk)), int(window), q.device)

    mask = layout.derive(("block mask", window, chunk, q.device), build_mask)
    flat = [x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]
    options = {"score_mod": softcap_mod(softcap) if softcap else None, "block_mask": mask, "scale": scale}
    y, aux = compiled_flex_attention()(*flat, **options, enable_gqa=q.shape[2] != k.shape[2], return_aux=AuxRequest(lse=True))
    if sinks is not None:
        y = (y * (aux.lse - sinks.float()[:, None]).sigmoid()[..., None]).type_as(y)
    return y[0].transpose(0, 1).reshape(q.shape)


@cache
def softcap_mod(softcap: float) -> Callable[..., Tensor]:
    def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score


def build_block_mask(bounds: Tensor, key_bounds: Tensor, window: int, device: torch.device) -> BlockMask:
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
    listed = [x for part in (seen & ~whole, whole) for x in column_indices(part)]
    partly, partly_at, wholly, wholly_at = (copy_to_device(x[None, None], device) for x in listed)
    visible = visibility_fn(*(copy_to_device(x.int(), device) for x in (oldest, newest)))
    return BlockMask.from_kv_blocks(
        partly, partly_at, wholly, wholly_at, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(tokens, keys)
    )


def column_indices(seen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the columns of each row are seen, and which: these first."""
    return seen.sum(1, dtype=torch.int32), seen.int().argsort(dim=1, descending=True, stable=True).int()


def visibility_fn(oldest: Tensor, newest: Tensor) -> Callable[..., Tensor]:
    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= newest[query]) & (key >= oldest[query])

    return seen
