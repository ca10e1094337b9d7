"""Bamba: Mamba 2 with attention in some layers. Falcon-H1: both in parallel in every layer, with multipliers."""

from dataclasses import replace

from tunekit.models.families.base import (
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    head_dim,
    mlp_spec,
    reject_config_values,
    with_default_config,
)
from tunekit.models.families.mamba_base import DEFAULTS, MAMBA, mamba_spec
from tunekit.models.spec import DecoderSpec, Layer, Norm, ParallelMixers
from tunekit.models.weight_map import KeyRule

NAMES = (
    KeyRule("norm", "model.final_layernorm"),
    KeyRule("layers.{}.mlp", "model.layers.{}.feed_forward"),
    KeyRule("layers.{}.mlp_norm", "model.layers.{}.pre_ff_layernorm"),
)
TABLE = (*MAMBA, *NAMES, *LLAMA)
BAMBA = DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5}
BAMBA |= {"partial_rotary_factor": 0.5, "attn_layer_indices": []}


def bamba(config: Config) -> DecoderSpec:
    c = with_default_config(config, **BAMBA)
    reject_config_values(c, {"partial_rotary_factor": 0.5})  # of transformers, unless it is in rope_parameters
    has_attention = [i in c["attn_layer_indices"] for i in range(c["num_hidden_layers"])]
    attention, mamba = attention_spec(c), None if all(has_attention) else mamba_spec(c)
    return decoder_spec(c, (Layer(attention if attends else mamba, mlp_spec(c)) for attends in has_attention))


FALCON_TABLE = (
    KeyRule("layers.{}.attn.attn", "model.layers.{}.self_attn"),
    KeyRule("layers.{}.attn.mamba", "model.layers.{}.mamba"),
    *NAMES,
    *LLAMA,
)
FALCON = DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
FALCON |= {"mamba_d_ssm": 1024, "projectors_bias": False, "mamba_rms_norm": False, "mamba_norm_before_gate": True}
FALCON |= {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "key_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0]}
FALCON |= {"attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_multipliers": [1.0] * 5}
FALCON |= {"ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0}


def falcon_h1(config: Config) -> DecoderSpec:
    c = with_default_config(config, **FALCON)
    for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if len(c[key]) != count:
            raise ValueError(f"{key} must have {count} values, got {len(c[key])}")
    mamba = mamba_spec(
        c,
        out_bias=bool(c["projectors_bias"]),
        norm=Norm(c["rms_norm_eps"], scale_in_fp32=True) if c["mamba_rms_norm"] else None,
        norm_before_gate=bool(c["mamba_norm_before_gate"]),
        multipliers=tuple(c["ssm_multipliers"]),
        adaptable_out_proj=False,
    )
    # Scaled keys are scaled scores.
    attention = attention_spec(c, scale=head_dim(c) ** -0.5 * c["key_multiplier"])
    scales = (c["attention_in_multiplier"], c["attention_out_multiplier"])
    mixer = ParallelMixers(attention, mamba, scales, (c["ssm_in_multiplier"], c["ssm_out_multiplier"]))
    layer = Layer(mixer, replace(mlp_spec(c), scales=tuple(c["mlp_multipliers"])))
    return decoder_spec(
        c,
        [layer] * c["num_hidden_layers"],
        embed_scale=c["embedding_multiplier"],
        logit_scale=c["lm_head_multiplier"],
    )
