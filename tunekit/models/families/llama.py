"""Llama 2 and 3.x, SmolLM2, all checkpoints with the same architecture, SmolLM3 and Seed-OSS."""

from tunekit.models.families.base import (
    Config,
    attention_spec,
    decoder_spec,
    layers_with_rope,
    mlp_spec,
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
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    with_rope, without_rope = attention_spec(c), attention_spec(c, rope=None, window=window)
    mixers = (with_rope if has_rope else without_rope for has_rope in layers_with_rope(c))
    return decoder_spec(c, (Layer(mixer, mlp_spec(c)) for mixer in mixers))
