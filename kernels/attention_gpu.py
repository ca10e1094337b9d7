"""Attention on a GPU: FlashAttention over all packed documents, or FlexAttention for softcap and fp32.

Document bounds are on the CPU and are copied to the device once per pass, without synchronization.
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
    MAX_FLASH_HEAD_DIM,
    MAX_FLEX_HEAD_BYTES,
    AttentionBackend,
    AttentionCall,
    choose_attention_backend,
    get_capabilities,
)
from tunekit.kernels.attention_cpu import flatten_tokens, register_gradients
from tunekit.kernels.custom_op import KernelOp
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout
from tunekit.kernels.torch_compile import assume_constant_result, disable_compile
from tunekit.kernels.triton_support import can_launch

MIN_HEAD_DIM, HEAD_DIM_MULTIPLE = 16, 8  # of GPU kernels
BLOCK = 128  # queries and keys of a FlexAttention block
Bounds = tuple[Tensor, int, Tensor, int]  # cu_seqlens and max_seqlen of queries, then those of keys
# Up to this many tokens, FlexAttention is not used if no gradient is needed: compiling it takes 20 to 60 s.
MAX_UNCOMPILED_TOKENS = 2**12
FLEX_VARIANTS = 64  # dtypes, head dims, windows, caps, with and without gradients: each is compiled once


def is_gpu(device: torch.device) -> bool:
    """Whether this module supports the device."""
    return device.type == "cuda"


def is_supported(q: Tensor, capped: bool) -> bool:
    """Whether FlashAttention or FlexAttention supports packed documents of these queries; `capped`: with softcap."""
    if not is_gpu(q.device):
        return False
    needs_flex = capped or q.dtype == torch.float32
    if needs_flex and not can_compile_flex():
        return False
    if needs_flex and not torch.is_grad_enabled() and q.shape[0] * q.shape[1] <= MAX_UNCOMPILED_TOKENS:
        return False  # for example, when a checkpoint is verified
    return has_packed_kernel(q.device, q.dtype, head_dim_limit(q.shape[-1]))


def head_dim_limit(head_dim: int) -> int:
    """The largest head size that the same kernels support: a constant, also where Dynamo traces `head_dim` as a symbol.

    It does after a graph break: FlexAttention is compiled separately.
    """
    if head_dim <= MAX_FLEX_HEAD_BYTES // torch.float32.itemsize:
        return MAX_FLEX_HEAD_BYTES // torch.float32.itemsize
    return MAX_FLASH_HEAD_DIM if head_dim <= MAX_FLASH_HEAD_DIM else MAX_FLASH_HEAD_DIM + 1


@assume_constant_result  # Dynamo traces into cached functions
def can_compile_flex() -> bool:
    """Whether Triton works, to which FlexAttention is compiled."""
    return can_launch()


@assume_constant_result
def has_packed_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    call = AttentionCall("cuda", dtype, head_dim, get_capabilities(device), is_packed=True)
    return choose_attention_backend(call) is not AttentionBackend.PER_DOCUMENT


def attention_gpu(
    q: Tensor, k: Tensor, v: Tensor, params: list[float], layout: SequenceLayout | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention (B, S, H, D_v). `params`: scale, window, chunk and softcap; 0: none.

    Documents with a shared prefix have more keys than queries; the queries belong to the last keys.
    """
    layout = rows_layout(*q.shape[:2]) if layout is None else layout
    v_dim = v.shape[-1]
    head_dim = max(MIN_HEAD_DIM, -(-max(q.shape[-1], v_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE)
    q, k, v = (x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1])) for x in (q, k, v))
    if q.dtype in HALF_DTYPES and not params[3] and (sinks is None or get_capabilities(q.device).flash_lse):
        cu_seqlens, max_seqlen, key_cu_seqlens, max_key_seqlen = varlen_bounds(layout, int(params[2]), q.device)
        y, _ = flash_attention(q, k, v, cu_seqlens, key_cu_seqlens, sinks, max_seqlen, max_key_seqlen, params)
        return y[..., :v_dim]
    return flex(q, k, v, layout, sinks, params)[..., :v_dim]


def prepare_layout(
    layout: SequenceLayout | None, shape: torch.Size, chunks: Iterable[int], device: torch.device
) -> SequenceLayout | None:
    """Copy document bounds to the GPU before the layers run, which may be compiled.

    Returns the layout with these copies. Without a layout, each row of tokens (B, S) = `shape` is a document.
    """
    if not is_gpu(device):
        return layout
    layout = rows_layout(*shape) if layout is None else layout
    for chunk in chunks:
        varlen_bounds(layout, chunk, device)
    return layout


def varlen_bounds(layout: SequenceLayout, chunk: int, device: torch.device) -> Bounds:
    """cu_seqlens of queries and keys on the device, with their maximum lengths as integers."""
    if (chunk, device) not in layout.varlen_bounds:
        with torch.inference_mode(False):
            layout.varlen_bounds[chunk, device] = copy_bounds(layout.cu_seqlens, layout.key_cu_seqlens, chunk, device)
    return layout.varlen_bounds[chunk, device]


def split_chunks(cu_seqlens: Tensor, key_cu_seqlens: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Bounds of queries and keys of documents, or of the chunks inside of documents."""
    if not chunk:
        return cu_seqlens, key_cu_seqlens
    lengths = key_cu_seqlens.diff()
    num_prefix_keys = lengths - cu_seqlens.diff()
    num_chunks = -(-lengths // chunk)
    first_chunk = (num_chunks.cumsum(0) - num_chunks).repeat_interleave(num_chunks)
    starts = chunk * (torch.arange(len(first_chunk)) - first_chunk)  # keys of the document before each chunk of it
    queries = (starts - num_prefix_keys.repeat_interleave(num_chunks)).clamp(min=0)
    pairs = (cu_seqlens, queries), (key_cu_seqlens, starts)
    split = (torch.cat([at[:-1].repeat_interleave(num_chunks) + more, at[-1:]]).to(at.dtype) for at, more in pairs)
    return next(split), next(split)


def copy_bounds(cu_seqlens: Tensor, key_cu_seqlens: Tensor, chunk: int, device: torch.device) -> Bounds:
    (q, max_seqlen), (k, max_key_seqlen) = (
        (at.int(), int(at.diff().max())) for at in split_chunks(cu_seqlens, key_cu_seqlens, chunk)
    )
    return copy_to_device(q, device), max_seqlen, copy_to_device(k, device), max_key_seqlen


# ---- FlashAttention ----
# torch.nn.attention.varlen_attn calls the same two operators, but its arguments differ between torch 2.11 and 2.13, and
# it drops the gradient of the log-sum-exp, which sinks need. If a document has more keys than queries, the causal
# diagonal ends at the bottom right.


def window_args(window: int) -> dict[str, int]:
    """Window arguments of FlashAttention; -1: unlimited."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def flash_forward(  # noqa: PLR0913 (an operator takes no named tuples)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    sinks: Tensor | None,
    max_seqlen: int,
    max_key_seqlen: int,
    params: list[float],
) -> tuple[Tensor, Tensor]:
    """Causal attention (B, S, H, D), and log-sum-exp (H, B * S) including the sinks.

    Bounds are on the device, so that recomputation and the backward pass do not copy them again.
    """
    window = int(params[1])
    y, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(flatten_tokens(x) for x in (q, k, v)),
        cu_seqlens,
        key_cu_seqlens,
        max_seqlen,
        max_key_seqlen,
        0.0,  # dropout
        not window,  # causal
        False,  # no mask for debugging
        scale=params[0],
        **window_args(window),
    )
    if sinks is not None:
        sink = sinks.float()[:, None]
        y = (y * (lse - sink).sigmoid().T[..., None]).type_as(y)
        lse = torch.logaddexp(lse, sink)
    return y.view_as(q), lse


def flash_gradients(
    grad: Tensor, saved: list[Tensor], max_seqlen: int, max_key_seqlen: int, params: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks, as `register_gradients` defines them."""
    q, k, v, cu_seqlens, key_cu_seqlens, y, lse, *sinks = saved
    window = int(params[1])
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # no dropout
    # The log-sum-exp includes the sink, so the kernel computes probabilities that add up to less than 1, as needed.
    gradients = torch.ops.aten._flash_attention_backward(
        *(flatten_tokens(x) for x in (grad.contiguous(), q, k, v, y)),
        lse,
        cu_seqlens,
        key_cu_seqlens,
        max_seqlen,
        max_key_seqlen,
        0.0,  # dropout
        not window,  # causal
        seed,
        unused,
        scale=params[0],
        **window_args(window),
    )
    dq, dk, dv = (x.view(like.shape) for x, like in zip(gradients, (q, k, v), strict=True))
    if not sinks:
        return dq, dk, dv, q.new_empty(0)
    delta = (grad.float() * y.float()).sum(-1).flatten().view(-1, len(lse)).T
    sink_grad = -((sinks[0].float()[:, None] - lse).exp() * delta).sum(1)
    return dq, dk, dv, sink_grad.type_as(sinks[0])


flash_attention = KernelOp("flash_attention", flash_forward)
flash_attention_backward = KernelOp("flash_attention_backward", flash_gradients)


@flash_attention.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(heads, rows * length, dtype=torch.float32)


register_gradients(flash_attention, flash_attention_backward)


# ---- FlexAttention ----


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Compiled flex_attention, with a raised recompile limit.

    After 8 variants, torch would run FlexAttention uncompiled, with all scores in memory. `fullgraph` makes it raise.
    A second scale or softcap in a process must be a constant, too: with symbolic ones, the backward pass fails to
    compile (torch 2.11: "Pending unbacked symbols").
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, FLEX_VARIANTS)
    config.specialize_float = True
    return torch.compile(flex_attention, fullgraph=True)


@disable_compile  # compiled separately, because its block mask is computed on the CPU
def flex(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, sinks: Tensor | None, params: list[float]) -> Tensor:
    """Causal attention (B, S, H, D) by FlexAttention, with softcap."""
    scale, window, chunk, softcap = params

    def build_mask() -> BlockMask:
        return build_block_mask(
            *split_chunks(layout.cu_seqlens, layout.key_cu_seqlens, int(chunk)), int(window), q.device
        )

    mask = layout.derive(("block mask", window, chunk, q.device), build_mask)
    flat = [x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]
    options = {"score_mod": softcap_mod(softcap) if softcap else None, "block_mask": mask, "scale": scale}
    y, aux = compiled_flex_attention()(
        *flat, **options, enable_gqa=q.shape[2] != k.shape[2], return_aux=AuxRequest(lse=True)
    )
    if sinks is not None:
        y = (y * (aux.lse - sinks.float()[:, None]).sigmoid()[..., None]).type_as(y)
    return y[0].transpose(0, 1).reshape(q.shape)


@cache
def softcap_mod(softcap: float) -> Callable[..., Tensor]:
    def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score


def build_block_mask(cu_seqlens: Tensor, key_cu_seqlens: Tensor, window: int, device: torch.device) -> BlockMask:
    """Block mask with partially and fully visible key blocks, computed from the bounds without a mask of all pairs."""
    tokens, keys = int(cu_seqlens[-1]), int(key_cu_seqlens[-1])
    lengths = cu_seqlens.diff()
    # Last and first visible key of each query; both are non-decreasing.
    last_visible = torch.arange(tokens) + (key_cu_seqlens[1:] - cu_seqlens[1:]).repeat_interleave(lengths).long()
    first_visible = key_cu_seqlens[:-1].repeat_interleave(lengths).long()
    if window:
        first_visible = torch.maximum(first_visible, last_visible - window + 1)
    rows, columns = -(-tokens // BLOCK), torch.arange(-(-keys // BLOCK))
    first, last = torch.arange(rows) * BLOCK, (torch.arange(1, rows + 1) * BLOCK).clamp(max=tokens) - 1
    mask = (columns >= first_visible[first, None] // BLOCK) & (columns <= last_visible[last, None] // BLOCK)
    starts = columns * BLOCK
    full_mask = mask & (starts >= first_visible[last, None]) & (starts + BLOCK - 1 <= last_visible[first, None])
    indices = [x for block_mask in (mask & ~full_mask, full_mask) for x in column_indices(block_mask)]
    partial_counts, partial_indices, full_counts, full_indices = (
        copy_to_device(x[None, None], device) for x in indices
    )
    visible = visibility_mask_mod(*(copy_to_device(x.int(), device) for x in (first_visible, last_visible)))
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(tokens, keys),
    )


def column_indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Number of visible columns per row, and column indices with the visible ones first."""
    return mask.sum(1, dtype=torch.int32), mask.int().argsort(dim=1, descending=True, stable=True).int()


def visibility_mask_mod(first_visible: Tensor, last_visible: Tensor) -> Callable[..., Tensor]:
    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= last_visible[query]) & (key >= first_visible[query])

    return is_visible
