"""OLMo 2 and 3: norms after attention and MLP instead of before, and QK norms over all heads."""

from dataclasses import replace

from tunekit.models.families.base import (
    FULL,
    LLAMA,
    SLIDING,
    Config,
    alternate_layers,
    attention_spec,
    decoder_spec,
    mlp_spec,
    rope_for_layer_type,
    with_default_config,
)
from tunekit.models.spec import Attention, DecoderSpec, Layer, Norm
from tunekit.models.weight_map import KeyRule

TABLE = (
    KeyRule("layers.{}.attn_post_norm", "model.layers.{}.post_attention_layernorm"),
    KeyRule("layers.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm"),
    *LLAMA,
)
DEFAULTS = {"rms_norm_eps": 1e-5}
DEFAULTS3 = DEFAULTS | {"rope_theta": 5e5, "sliding_window": 4096}


def olmo2(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    return spec(c, [attention_spec(c)] * c["num_hidden_layers"])


def olmo3(config: Config) -> DecoderSpec:
    """OLMo 3: sliding windows in three of four layers; RoPE scaling only in full layers."""
    c = with_default_config(config, **DEFAULTS3)
    full = attention_spec(c, rope=rope_for_layer_type(c, FULL))
    sliding = replace(full, rope=rope_for_layer_type(c, SLIDING, rope_scaling=None), window=c["sliding_window"])
    return spec(c, alternate_layers(c, 4, sliding, full))


def spec(c: Config, mixers: list[Attention]) -> DecoderSpec:
    norm = Norm(c["rms_norm_eps"], scale_in_fp32=True)
    qk_norm = replace(norm, over_all_heads=True)
    layers = (Layer(replace(mixer, qk_norm=qk_norm), mlp_spec(c), pre_norm=False, post_norm=True) for mixer in mixers)
    return decoder_spec(c, layers, norm=norm)
