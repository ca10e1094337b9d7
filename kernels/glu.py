"""Gated activations of feed-forward layers."""

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gated(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up."""
    return ACTIVATIONS[act](gate) * up
