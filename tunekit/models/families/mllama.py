"""Llama 3.2 Vision: its text model, in which the layers that attend to images do nothing without images."""

from tunekit.models.families.base import (
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    mlp_spec,
    reject_config_values,
    text_model_table,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weight_map import HubOnly, KeyRule

TABLE = text_model_table(LLAMA, "vision_model", "multi_modal_projector")
DEFAULTS = {"num_key_value_heads": 8, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
DEFAULTS |= {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    reject_config_values(c, {"tie_word_embeddings": False})
    layer = Layer(attention_spec(c, bias=False, out_bias=False), mlp_spec(c | {"mlp_bias": False}))
    crosses = (i in c["cross_attention_layers"] for i in range(c["num_hidden_layers"]))
    # The embedding also has rows for the image token and seven reserved ones.
    return decoder_spec(c, (Layer(None, None) if cross else layer for cross in crosses), extra_embeddings=8)


def config_table(config: Config) -> tuple[KeyRule, ...]:
    """Cross-attention layers are copied unchanged."""
    c = with_default_config(config, **DEFAULTS)
    return tuple(KeyRule((), f"model.layers.{i}", HubOnly()) for i in c["cross_attention_layers"])
