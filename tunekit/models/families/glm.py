"""GLM-4: interleaved RoPE in half of each head; the 0414 version has sandwich norms."""

from dataclasses import replace

from tunekit.models.families.base import (
    FUSED_MLP,
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    mlp_spec,
    rope_from_config,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weight_map import KeyRule

TABLE = (FUSED_MLP, *LLAMA)
TABLE4 = (
    KeyRule("layers.{}.attn_post_norm", "model.layers.{}.post_self_attn_layernorm"),
    KeyRule("layers.{}.mlp_post_norm", "model.layers.{}.post_mlp_layernorm"),
    *TABLE,
)
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7}
DEFAULTS |= {"attention_bias": True, "partial_rotary_factor": 0.5}


def glm(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    mixer = attention_spec(c, rope=replace(rope_from_config(c), interleaved=True), out_bias=False)
    return decoder_spec(c, [Layer(mixer, mlp_spec(c))] * c["num_hidden_layers"])


def glm4(config: Config) -> DecoderSpec:
    """`glm` with norms after attention and MLP."""
    spec = glm(config)
    return replace(spec, layers=tuple(replace(layer, post_norm=True) for layer in spec.layers))
