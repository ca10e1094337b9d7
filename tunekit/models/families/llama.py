"""Llama 2 and 3.x, SmolLM2, all checkpoints with the same architecture, SmolLM3 and Seed-OSS."""

from tunekit.models.families.base import (
    FULL,
    SLIDING,
    Config,
    attention_spec,
    decoder_spec,
    layer_types,
    layers_with_rope,
    mlp_spec,
    rope_from_config,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config)
    return decoder_spec(c, [Layer(attention_spec(c), mlp_spec(c))] * c["num_hidden_layers"])


SEED_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288}
SEED_DEFAULTS |= {"attention_bias": True, "attention_out_bias": False}


def seed_oss(config: Config) -> DecoderSpec:
    """Seed-OSS: Llama with a separate flag for the bias of the output projection."""
    c = with_default_config(config, **SEED_DEFAULTS)
    layer = Layer(attention_spec(c, out_bias=bool(c["attention_out_bias"])), mlp_spec(c))
    return decoder_spec(c, [layer] * c["num_hidden_layers"])


SMOLLM3_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "max_position_embeddings": 32_768}
SMOLLM3_DEFAULTS |= {"no_rope_layer_interval": 4, "tie_word_embeddings": True}


def smollm3(config: Config) -> DecoderSpec:
    """SmolLM3: Llama without RoPE in every fourth layer."""
    c = with_default_config(config, **SMOLLM3_DEFAULTS)
    has_rope, window = layers_with_rope(c), c.get("sliding_window")
    slides = bool(c.get("use_sliding_window")) and window is not None
    types = layer_types(c, [SLIDING if slides and not rotates else FULL for rotates in has_rope])
    rope, ffn = rope_from_config(c), mlp_spec(c)
    mixers = (
        attention_spec(c, rope=rope if rotates else None, window=window if kind == SLIDING else None)
        for rotates, kind in zip(has_rope, types, strict=True)
    )
    return decoder_spec(c, (Layer(mixer, ffn) for mixer in mixers))
