"""Rotary positions: a Rope spec to cos and sin tables, and their use on queries and keys."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tunekit.models.spec import LinearScaling, Llama3Scaling, Rope, YarnScaling


class Rotation(NamedTuple):
    """Tables of one pass, both (B, S, 1, dims / 2), fp32."""

    cos: Tensor
    sin: Tensor


def frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies of the rotated channel pairs (dims / 2,), and the factor on cos and sin."""
    dims = rope.dims or head_dim
    freq = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    match rope.scaling:
        case None:
            return freq, 1.0
        case LinearScaling(factor):
            return freq / factor, 1.0
        case Llama3Scaling() as s:
            smooth = (s.context * freq / (2 * math.pi) - s.low) / (s.high - s.low)
            return torch.lerp(freq / s.factor, freq, smooth.clamp(0, 1)), 1.0
        case YarnScaling() as s:
            return yarn(s, rope.theta, dims, freq), s.amplitude


def yarn(s: YarnScaling, theta: float, dims: int, freq: Tensor) -> Tensor:
    """Channels that turn more than `fast` times in the context keep their speed, those below `slow` are stretched."""
    turns = [dims * math.log(s.context / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (s.fast, s.slow)]
    low, high = (math.floor(turns[0]), math.ceil(turns[1])) if s.truncate else turns
    low, high = max(low, 0), min(high, dims - 1)
    ramp = ((torch.arange(dims // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return torch.lerp(freq, freq / s.factor, ramp)


def tables(rope: Rope, head_dim: int, positions: Tensor) -> Rotation:
    """Rotation of every position (B, S)."""
    with torch.device("cpu"):
        freq, amplitude = frequencies(rope, head_dim)
    angle = positions[..., None].float() * freq.to(positions.device)
    return Rotation(angle.cos()[:, :, None] * amplitude, angle.sin()[:, :, None] * amplitude)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first channels of `x` (B, S, H, D) in fp32; the others pass."""
    cos, sin = rotation
    dims = 2 * cos.shape[-1]
    a, b = x[..., :dims].float().chunk(2, dim=-1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)
    return turned if dims == x.shape[-1] else torch.cat([turned, x[..., dims:]], dim=-1)
