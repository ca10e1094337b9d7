"""Gemma 1, 2 and 3, and the text model of multimodal Gemma 3."""

from collections.abc import Iterable
from dataclasses import replace

from tunekit.models.families.base import (
    FULL,
    LLAMA,
    SANDWICH,
    SLIDING,
    Config,
    alternate_layers,
    attention_spec,
    decoder_spec,
    mlp_spec,
    reject_config_values,
    rope_for_layer_type,
    text_model_table,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer, Norm

TABLE = (*SANDWICH, *LLAMA)
VISION = text_model_table(TABLE, "vision_tower", "multi_modal_projector")

DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
DEFAULTS1 = DEFAULTS | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"}
DEFAULTS2 = DEFAULTS | {"num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"}
DEFAULTS2 |= {"query_pre_attn_scalar": 256}
DEFAULTS2 |= {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# Multimodal configs only contain differences from these sizes.
DEFAULTS3 = DEFAULTS2 | {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
DEFAULTS3 |= {"num_attention_heads": 8, "max_position_embeddings": 131_072, "sliding_window_pattern": 6}
DEFAULTS3 |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
DEFAULTS3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}


def gemma(config: Config) -> DecoderSpec:
    """Gemma 1. The first config files say gelu and mean its tanh approximation."""
    c = with_default_config(config, **DEFAULTS1)
    act = "gelu_pytorch_tanh" if c["hidden_act"] == "gelu" else c["hidden_act"]
    layer = Layer(attention_spec(c), mlp_spec(c | {"hidden_act": act}))
    return gemma_spec(c, [layer] * c["num_hidden_layers"])


def gemma2(config: Config) -> DecoderSpec:
    """Gemma 2: sliding windows in every second layer, sandwich norms, soft caps."""
    c = with_default_config(config, **DEFAULTS2)
    full = attention_spec(c, scale=c["query_pre_attn_scalar"] ** -0.5, softcap=c["attn_logit_softcapping"])
    sliding = replace(full, window=c["sliding_window"])
    ffn = mlp_spec(c | {"hidden_act": c["hidden_activation"]})
    return gemma_spec(c, (Layer(mixer, ffn, post_norm=True) for mixer in alternate_layers(c, 2, sliding, full)))


def gemma3(config: Config) -> DecoderSpec:
    """Gemma 3: five sliding-window layers per full layer, each type with its own RoPE; QK norms."""
    c = with_default_config(config, **DEFAULTS3)
    reject_config_values(c, {"attn_logit_softcapping": None})
    scale, norm = c["query_pre_attn_scalar"] ** -0.5, Norm(c["rms_norm_eps"], offset=1.0)
    full = attention_spec(c, rope=rope_for_layer_type(c, FULL), scale=scale, qk_norm=norm)
    local_rope = rope_for_layer_type(c, SLIDING, rope_theta=c["rope_local_base_freq"], rope_scaling=None)
    sliding = replace(full, rope=local_rope, window=c["sliding_window"])
    ffn, every = mlp_spec(c | {"hidden_act": c["hidden_activation"]}), c["sliding_window_pattern"]
    return gemma_spec(c, (Layer(mixer, ffn, post_norm=True) for mixer in alternate_layers(c, every, sliding, full)))


def gemma3_vision(config: Config) -> DecoderSpec:
    """Text model of multimodal Gemma 3, whose logits transformers does not cap."""
    reject_config_values(config, {"final_logit_softcapping": None})
    return gemma3(config)


def gemma_spec(c: Config, layers: Iterable[Layer]) -> DecoderSpec:
    """Decoder whose norms store weight - 1 and whose embeddings are scaled by sqrt(dim)."""
    reject_config_values(c, {"use_bidirectional_attention": False})
    norm, cap = Norm(c["rms_norm_eps"], offset=1.0), c.get("final_logit_softcapping")
    return decoder_spec(c, layers, norm=norm, embed_scale=c["hidden_size"] ** 0.5, logit_softcap=cap)
