"""Mistral, Mixtral, Ministral and Ministral 3, and the text model of multimodal ones."""

from tunekit.models.families.base import (
    LLAMA,
    SLIDING,
    Config,
    attention_spec,
    decoder_spec,
    layer_types,
    mlp_spec,
    reject_config_values,
    rope_from_config,
    rope_scaling_config,
    text_model_table,
    with_default_config,
)
from tunekit.models.families.moe_base import EXPERTS, OURS, ROUTER, expert_table, moe_spec
from tunekit.models.spec import AttnTemperatureTuning, DecoderSpec, Layer
from tunekit.models.weight_map import KeyRule

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
DEFAULTS3 = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5}
VISION = text_model_table(LLAMA, "vision_tower", "multi_modal_projector")


def mistral(config: Config) -> DecoderSpec:
    """Mistral. The first version has a sliding window; later ones set it to null."""
    c = with_default_config(config, **DEFAULTS)
    return decoder_spec(c, [Layer(attention_spec(c, window=c["sliding_window"]), mlp_spec(c))] * c["num_hidden_layers"])


def ministral(config: Config) -> DecoderSpec:
    """Ministral: sliding windows in some layers."""
    c = with_default_config(config, **DEFAULTS)
    sliding, full = (attention_spec(c, window=window) for window in (c["sliding_window"], None))
    mixers = (sliding if kind == SLIDING else full for kind in layer_types(c, [SLIDING] * c["num_hidden_layers"]))
    return decoder_spec(c, (Layer(mixer, mlp_spec(c)) for mixer in mixers))


def ministral3(config: Config) -> DecoderSpec:
    """Ministral 3: temperature tuning beyond the original context."""
    c = with_default_config(config, **DEFAULTS3)
    p = rope_scaling_config(c) or YARN
    reject_config_values(c, {"original_max_position_embeddings": p["original_max_position_embeddings"]})
    tuning = AttnTemperatureTuning(p["llama_4_scaling_beta"], p["original_max_position_embeddings"])
    mixer = attention_spec(
        c, rope=rope_from_config(c | {"rope_scaling": p}), window=c.get("sliding_window"), temperature_tuning=tuning
    )
    return decoder_spec(c, [Layer(mixer, mlp_spec(c))] * c["num_hidden_layers"])


def vision(config: Config) -> DecoderSpec:
    """Mistral Small 3.1 and later, Ministral 3: the text model is one of the above."""
    if config["model_type"] not in TEXT_MODELS:
        raise ValueError(f"text_config: model_type {config['model_type']!r} is not supported")
    return TEXT_MODELS[config["model_type"]](config)


TEXT_MODELS = {"mistral": mistral, "ministral": ministral, "ministral3": ministral3}


LEGACY_HUB = "model.layers.{}.block_sparse_moe"  # names in all published checkpoints
MIXTRAL_TABLE = (
    KeyRule(f"{OURS}.router", f"{LEGACY_HUB}.gate"),
    *expert_table(f"{OURS}.experts", f"{LEGACY_HUB}.experts", ("w1", "w3", "w2")),
    *ROUTER,
    *EXPERTS,
    *LLAMA,
)
MIXTRAL_DEFAULTS = DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}


def mixtral(config: Config) -> DecoderSpec:
    """Mixtral: Mistral with experts."""
    c = with_default_config(config, **MIXTRAL_DEFAULTS)
    layer = Layer(attention_spec(c, window=c.get("sliding_window")), moe_spec(c, c["intermediate_size"]))
    return decoder_spec(c, [layer] * c["num_hidden_layers"])
