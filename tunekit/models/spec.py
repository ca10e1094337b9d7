"""What a decoder is, as data. Nothing here imports torch; every value is frozen, hashes and prints."""

from dataclasses import dataclass
from typing import Literal

Act = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over the last axis."""

    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low: float
    high: float
    context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): a ramp over the channels, and `amplitude` on cos and sin."""

    factor: float
    context: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, in the half-split layout of the Hub's checkpoints."""

    theta: float = 10_000.0
    dims: int | None = None  # rotated channels of a head; None: all
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    rope: Rope | None = None  # None: no positions in this layer
    qk_norm: Norm | None = None  # over each head of q and k, before rotation
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    scale: float | None = None  # on the scores; None: head_dim ** -0.5


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated feed-forward layer: down(act(gate(x)) * up(x))."""

    hidden: int
    act: Act = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: a mixer of tokens, then a feed-forward part, each behind a norm and beside a residual."""

    mixer: Attention
    ffn: MLP


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder. `std` is the spread of a fresh weight, `context` the longest row it was trained for."""

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    norm: Norm = Norm()
    tied: bool = False  # the head is the embedding
    std: float = 0.02
    context: int = 2048
