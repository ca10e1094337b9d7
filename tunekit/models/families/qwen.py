"""Qwen2, Qwen2.5 and Qwen3, dense, and the text part of those that also see."""

from typing import Any

from tunekit.models.families.base import LLAMA, Config, attention, beside, complete, decoder, mlp, text, windows
from tunekit.models.spec import DecoderSpec, Layer, Norm

# Before transformers 4.52 the text part had the names of a model that only reads; files still have.
VISION = (*beside(LLAMA, "visual"), *LLAMA)

USUAL = {"max_position_embeddings": 32_768, "max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096}
USUAL2_VISION = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
USUAL3_VISION = {"max_position_embeddings": 128_000, "rope_theta": 5e5}


def qwen2(config: Config, **usual: Any) -> DecoderSpec:
    """Biases on q, k and v, whatever config.json says."""
    c = complete(config, **(USUAL | usual))
    return decoder(c, (Layer(attention(c, bias=True, out_bias=False, window=w), mlp(c)) for w in windows(c)))


def qwen3(config: Config, **usual: Any) -> DecoderSpec:
    """A norm over each head of q and k."""
    c = complete(config, head_dim=128, **(USUAL | usual))
    norm = Norm(c["rms_norm_eps"])
    return decoder(c, (Layer(attention(c, qk_norm=norm, window=w), mlp(c)) for w in windows(c)))


def qwen2_vision(config: Config) -> DecoderSpec:
    """Qwen2-VL and Qwen2.5-VL."""
    return qwen2(text(config, "qwen2"), **USUAL2_VISION)


def qwen3_vision(config: Config) -> DecoderSpec:
    return qwen3(text(config, "qwen3"), **USUAL3_VISION)
