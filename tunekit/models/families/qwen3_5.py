"""Qwen3.5, dense and MoE, and the text model of multimodal ones."""

from tunekit.models.families.base import Config, mlp_spec, text_config, text_model_table, with_default_config
from tunekit.models.families.qwen3_next import DEFAULTS, DENSE, EXPERTS, TABLE, experts, hybrid
from tunekit.models.spec import DecoderSpec

# A text model that transformers extracted from a multimodal one keeps its names.
TEXT, MOE_TEXT = (*DENSE, *text_model_table(DENSE, "visual")), (*TABLE, *text_model_table(TABLE, "visual"))
VISION, MOE_VISION = text_model_table(DENSE, "visual"), text_model_table(TABLE, "visual")
EXPERTS = EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8}


def dense(config: Config) -> DecoderSpec:
    c = with_default_config(config, **(DEFAULTS | {"num_key_value_heads": 4}))
    return hybrid(c, lambda _: mlp_spec(c))


def moe(config: Config) -> DecoderSpec:
    """MoE in every layer, with normalized weights; config.json has no dense width."""
    width = config.get("moe_intermediate_size") or EXPERTS["moe_intermediate_size"]
    c = with_default_config(config, **DEFAULTS, **EXPERTS, intermediate_size=width)
    return hybrid(c, lambda _: experts(c))


def vision(config: Config) -> DecoderSpec:
    return dense(text_config(config, "qwen3_5_text"))


def moe_vision(config: Config) -> DecoderSpec:
    return moe(text_config(config, "qwen3_5_moe_text"))
