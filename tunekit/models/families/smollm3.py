"""SmolLM3: Llama without RoPE in every fourth layer."""

from dataclasses import replace

from tunekit.models.families.base import (
    Config,
    attention_spec,
    decoder_spec,
    layers_with_rope,
    mlp_spec,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer

DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "max_position_embeddings": 32_768, "no_rope_layer_interval": 4}
DEFAULTS |= {"tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    rope_attention = attention_spec(c)
    nope_attention = replace(
        rope_attention, rope=None, window=c.get("sliding_window") if c.get("use_sliding_window") else None
    )
    return decoder_spec(
        c, (Layer(rope_attention if has_rope else nope_attention, mlp_spec(c)) for has_rope in layers_with_rope(c))
    )
