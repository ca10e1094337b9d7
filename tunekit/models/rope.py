"""Rotary position embeddings: cos and sin tables of a forward pass from a Rope spec."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.device_tensors import DeviceConstants
from tunekit.kernels.rope import RopeTables
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.models.spec import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling


def inv_freq(rope: Rope, head_dim: int) -> Tensor:
    """Inverse frequencies of the rotated channel pairs (dims / 2,), before scaling."""
    dims = rope.dims or head_dim
    freq = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / (head_dim if rope.pad else dims))
    return F.pad(freq, (0, (head_dim - dims) // 2)) if rope.pad else freq


def scaled_inv_freq(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies with the family's scaling, and the factor on cos and sin."""
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
    """YaRN interpolation: channels with more than `fast` turns in the context keep their frequency, those below `slow`
    are divided by `factor`."""
    bounds = [dims * math.log(s.context / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (s.fast, s.slow)]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if s.truncate else bounds
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 1e-3  # negative for a context of less than `slow` turns in all channels: no interpolation
    ramp = ((torch.arange(dims // 2) - low) / width).clamp(0, 1)
    return torch.lerp(freq, freq / s.factor, ramp)


@DeviceConstants
def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Scaled inverse frequencies (pairs,); for LongRoPE (2, pairs): short and long documents."""
    return scaled_inv_freq(rope, head_dim)[0]


def rope_tables(
    rope: Rope,
    head_dim: int,
    positions: Tensor,
    layout: SequenceLayout | None = None,
    lengths: Tensor | None = None,
) -> RopeTables:
    """cos and sin of each position (B, S). `layout` has the bounds of packed documents, `lengths` (B,) those of padded
    rows."""
    freq = inverse_frequencies(rope, head_dim, positions.device)
    attention_factor = rope.scaling.attention_factor if isinstance(rope.scaling, LongRopeScaling | YarnScaling) else 1.0
    if isinstance(rope.scaling, LongRopeScaling):
        freq = freq[(document_lengths(positions, layout, lengths) > rope.scaling.context).long()]
    angle = positions[..., None].float() * freq
    cos, sin = (fn(angle)[:, :, None] * attention_factor for fn in (torch.cos, torch.sin))
    return RopeTables(cos, sin, rope.interleaved, rope.interleaved_output)


def document_lengths(positions: Tensor, layout: SequenceLayout | None, lengths: Tensor | None) -> Tensor:
    """Number of tokens in the document of each token, (B, S) or (B, 1)."""
    if layout is not None:
        return layout.token_lengths(positions.device).view(positions.shape)
    return positions.amax(-1, keepdim=True) + 1 if lengths is None else lengths[:, None]
