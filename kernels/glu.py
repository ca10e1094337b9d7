"""Gated activations of feed-forward layers."""

import torch.nn.functional as F
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), with both kept within 7: gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * (gate * 1.702).sigmoid())


GATED = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": clamped_swiglu,
}


def gated(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up, or what the act makes of both."""
    return GATED[act](gate, up)
