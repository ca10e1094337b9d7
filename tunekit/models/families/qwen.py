"""Qwen2, Qwen2.5 and Qwen3, dense, and the text model of multimodal ones."""

from typing import Any

from tunekit.models.families.base import (
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    mlp_spec,
    sliding_windows,
    text_config,
    text_model_table,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer, Norm

# Before transformers 4.52, the text model had the names of a text-only model; many files still do.
VISION = (*text_model_table(LLAMA, "visual"), *LLAMA)

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
DEFAULTS2_VISION = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
DEFAULTS3_VISION = {"max_position_embeddings": 128_000, "rope_theta": 5e5}


def qwen2(config: Config, **overrides: Any) -> DecoderSpec:
    """Qwen2: biases on q, k and v, whatever config.json says."""
    c = with_default_config(config, **(DEFAULTS | overrides))
    return decoder_spec(
        c, (Layer(attention_spec(c, bias=True, out_bias=False, window=w), mlp_spec(c)) for w in sliding_windows(c))
    )


def qwen3(config: Config, **overrides: Any) -> DecoderSpec:
    """Qwen3: norms over each head of q and k."""
    c = with_default_config(config, head_dim=128, **(DEFAULTS | overrides))
    norm = Norm(c["rms_norm_eps"])
    return decoder_spec(c, (Layer(attention_spec(c, qk_norm=norm, window=w), mlp_spec(c)) for w in sliding_windows(c)))


def qwen2_vision(config: Config) -> DecoderSpec:
    """Text model of Qwen2-VL and Qwen2.5-VL."""
    return qwen2(text_config(config, "qwen2"), **DEFAULTS2_VISION)


def qwen3_vision(config: Config) -> DecoderSpec:
    return qwen3(text_config(config, "qwen3"), **DEFAULTS3_VISION)
