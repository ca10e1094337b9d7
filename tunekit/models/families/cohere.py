"""Cohere Command R and Command A: attention and MLP in parallel, with a layer norm; interleaved RoPE."""

from dataclasses import replace

from tunekit.models.families.base import (
    Config,
    alternate_layers,
    attention_spec,
    decoder_spec,
    mlp_spec,
    reject_config_values,
    rope_from_config,
    with_default_config,
)
from tunekit.models.spec import Attention, DecoderSpec, Layer, Norm

DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192, "tie_word_embeddings": True}
DEFAULTS1 = DEFAULTS | {"rope_theta": 5e5}
DEFAULTS2 = DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4}


def cohere(config: Config) -> DecoderSpec:
    """Command R."""
    c = with_default_config(config, **DEFAULTS1)
    reject_config_values(c, {"use_qk_norm": False})  # Command R+ has one scale per head
    return spec(c, [attention(c)] * c["num_hidden_layers"])


def cohere2(config: Config) -> DecoderSpec:
    """Command R7B and Command A: sliding windows in three of four layers, which alone have RoPE."""
    c = with_default_config(config, **DEFAULTS2)
    c["head_dim"] = None  # always the width divided by the heads
    local, window = attention(c), c["sliding_window"]
    full = replace(local, rope=None)
    mixers = alternate_layers(c, c["sliding_window_pattern"], replace(local, window=window), full)
    if window is None and any(mixer.rope is not None for mixer in mixers):
        raise ValueError("sliding_window must be an integer, because layer_types has sliding_attention")
    return spec(c, mixers)


def attention(c: Config) -> Attention:
    return attention_spec(c, rope=replace(rope_from_config(c), interleaved=True))


def spec(c: Config, mixers: list[Attention]) -> DecoderSpec:
    norm, ffn = Norm(c["layer_norm_eps"], centered=True), mlp_spec({**c, "mlp_bias": False})
    layers = (Layer(mixer, ffn, parallel=True) for mixer in mixers)
    return decoder_spec(c, layers, norm=norm, logit_scale=c["logit_scale"])
