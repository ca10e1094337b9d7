"""Attention of one query per row on a key/value cache of fixed size: constant shapes, and no wait for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.attention import AttentionParams, attend_slots, find_visible_slots
from tunekit.kernels.attention_choice import AttentionBackend, choose_attention_backend, describe_call
from tunekit.kernels.torch_compile import disable_compile


class CachePositions:
    """Where the current token of each row is in the cache. Layers with the same rule share what is derived from it."""

    def __init__(self, positions: Tensor, num_slots: int, num_visible: int) -> None:
        self.positions = positions  # (B, 1) of the current tokens; a slot has the index of its position
        self.num_slots = num_slots  # capacity of a row
        self.num_visible = num_visible  # no row has more tokens than this
        self.row_numbers = torch.arange(len(positions) + 1, device=positions.device, dtype=torch.int32)
        self.row_starts = self.row_numbers * num_slots
        self.write_index = self.row_starts[:-1] + positions[:, 0]  # (B,) in the flattened slots
        self.masks: dict[tuple[int | None, int | None], Tensor] = {}
        self.ranges: dict[tuple[int | None, int | None], tuple[Tensor, Tensor]] = {}

    def get_mask(self, params: AttentionParams) -> Tensor:
        """Slots that each query sees, (B, 1, 1, num_visible)."""
        key = params.window, params.chunk
        if key not in self.masks:
            self.masks[key] = find_visible_slots(self.positions, self.num_visible, params)
        return self.masks[key]

    def get_ranges(self, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """First visible slot of each row in the flattened cache, (B + 1,), and the number of visible ones, (B,).

        A window or a chunk is a later start, so one kernel call without mask or window serves every rule.
        """
        key = params.window, params.chunk
        if key not in self.ranges:
            last = self.positions[:, 0].int()
            first = torch.zeros_like(last)
            if params.window is not None:
                first = (last - (params.window - 1)).clamp(min=0)
            if params.chunk is not None:
                first = torch.maximum(first, last - last % params.chunk)
            # The kernel reads the end of a row only where it is given no lengths.
            starts = torch.cat([self.row_starts[:-1] + first, self.row_starts[-1:]])
            self.ranges[key] = starts, last - first + 1
        return self.ranges[key]


@disable_compile  # layers share what is derived from positions
def attend_decode(
    q: Tensor, k: Tensor, v: Tensor, at: CachePositions, params: AttentionParams, sinks: Tensor | None = None
) -> Tensor:
    """Attention of (B, 1, H, D) queries on caches (B, slots, H_kv, width) of keys and values: (B, 1, H, width).

    Caches may be wider than the heads; the additional channels are zero.
    """
    more = k.shape[-1] - q.shape[-1]
    q = F.pad(q, (0, more)) if more else q
    has_softcap = params.softcap is not None
    call = describe_call(q, k, v, has_mask=True, has_softcap=has_softcap, is_decoding=True)
    backend = choose_attention_backend(call)
    if backend is AttentionBackend.FLASH_DECODE:
        return decode_flash(q, k, v, at, params, sinks)
    k, v, mask = k[:, : at.num_visible], v[:, : at.num_visible], at.get_mask(params)
    if sinks is not None and backend is AttentionBackend.SDPA_EFFICIENT:
        return decode_efficient(q, k, v, mask, params.scale, sinks)
    return attend_slots(q, k, v, mask, params, sinks)


def decode_flash(
    q: Tensor, k: Tensor, v: Tensor, at: CachePositions, params: AttentionParams, sinks: Tensor | None
) -> Tensor:
    """FlashAttention over the flattened cache: time grows with the visible slots, shapes never change.

    Grouped heads become queries of one key head, and the keys are split among processors (flash decoding).
    """
    starts, lengths = at.get_ranges(params)
    bounds = at.row_numbers, starts, 1, at.num_visible
    y, lse, *_ = torch.ops.aten._flash_attention_forward(
        q[:, 0], k.flatten(0, 1), v.flatten(0, 1), *bounds, 0.0, False, False, scale=params.scale, seqused_k=lengths
    )
    return apply_sinks(y, lse.T, sinks)[:, None]


def decode_efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """The memory-efficient kernel with a mask. Sinks enter by the log-sum-exp, and no cache is copied."""
    rows = q[:, 0].unflatten(1, (k.shape[2], -1))  # grouped heads as queries of one key head: (B, H_kv, H / H_kv, D)
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    bias = bias.expand(len(q), k.shape[2], rows.shape[2], -1)
    y, lse = run_efficient(rows, k.transpose(1, 2), v.transpose(1, 2), bias, scale)
    return apply_sinks(y.flatten(1, 2), lse.flatten(1, 2), sinks)[:, None]


def run_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, S, D) and log-sum-exp (B, H, S) of torch's kernel, which rounds S up."""
    y, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    return y, lse[..., : q.shape[2]]


def apply_sinks(y: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Scale outputs (B, H, D) by the probability that sinks (H,) leave; `lse` (B, H) is that of the other scores."""
    return y if sinks is None else (y * (lse - sinks.float()).sigmoid()[..., None]).type_as(y)
