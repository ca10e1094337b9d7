"""Rotary positions: a Rope spec to the cos and sin tables of a pass."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.device_tensors import DeviceConstants
from tunekit.kernels.rope import RopeTables
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.models.spec import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling


def inv_freq(rope: Rope, head_dim: int) -> Tensor:
    """Inverse frequencies of the rotated channel pairs (dims / 2,), before what stretches positions."""
    dims = rope.dims or head_dim
    freq = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / (head_dim if rope.pad else dims))
    return F.pad(freq, (0, (head_dim - dims) // 2)) if rope.pad else freq


def scaled_inv_freq(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """The frequencies as the family stretches them, and the factor on cos and sin."""
    freq = inv_freq(rope, head_dim)
    match rope.scaling:
        case None:
            return freq, 1.0
        case LinearScaling(factor):
            return freq / factor, 1.0
        case Llama3Scaling() as s:
            smooth = (s.context * freq / (2 * math.pi) - s.low) / (s.high - s.low)
            return torch.lerp(freq / s.factor, freq, smooth.clamp(0, 1)), 1.0
        case YarnScaling() as s:
            return yarn(s, rope.theta, rope.dims or head_dim, freq), s.attention_factor
        case LongRopeScaling() as s:
            return freq / torch.tensor([s.short, s.long]), s.attention_factor


def yarn(s: YarnScaling, theta: float, dims: int, freq: Tensor) -> Tensor:
    """Channels that turn more than `fast` times in the context keep their speed, those below `slow` are stretched."""
    bounds = [dims * math.log(s.context / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (s.fast, s.slow)]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if s.truncate else bounds
    low, high = max(low, 0), min(high, dims - 1)
    ramp = ((torch.arange(dims // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return torch.lerp(freq, freq / s.factor, ramp)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Stretched frequencies (pairs,), of LongRoPE (2, pairs): for short documents and for long ones."""
    return scaled_inv_freq(rope, head_dim)[0]


FREQUENCIES = DeviceConstants(inverse_frequencies)


def rope_tables(
    rope: Rope,
    head_dim: int,
    positions: Tensor,
    layout: SequenceLayout | None = None,
    lengths: Tensor | None = None,
) -> RopeTables:
    """Rotation of every position (B, S). `layout` bounds packed documents, `lengths` (B,) padded ones."""
    freq = FREQUENCIES(rope, head_dim, device=positions.device)
    amplitude = rope.scaling.attention_factor if isinstance(rope.scaling, LongRopeScaling | YarnScaling) else 1.0
    if isinstance(rope.scaling, LongRopeScaling):
        freq = freq[(document_lengths(positions, layout, lengths) > rope.scaling.context).long()]
    angle = positions[..., None].float() * freq
    cos, sin = (fn(angle)[:, :, None] * amplitude for fn in (torch.cos, torch.sin))
    return RopeTables(cos, sin, rope.interleaved, rope.interleaved_output)


def document_lengths(positions: Tensor, layout: SequenceLayout | None, lengths: Tensor | None) -> Tensor:
    """How many tokens the document of each token has, (B, S) or (B, 1)."""
    if layout is not None:
        return layout.token_lengths(positions.device).view(positions.shape)
    return positions.amax(-1, keepdim=True) + 1 if lengths is None else lengths[:, None]
