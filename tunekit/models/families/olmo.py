"""OLMo 2 and 3: norms after attention and MLP, QK norms over all heads; OLMoE: experts in all layers."""

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
    reject_config_values,
    rename_keys,
    rope_for_layer_type,
    with_default_config,
)
from tunekit.models.families.moe_base import EXPERTS, ROUTER, moe_spec
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
    given = c.get("rope_parameters") or {}
    if any("rope_theta" not in (given.get(kind) or {}) for kind in (FULL, SLIDING)):
        reject_config_values(c, {"rope_theta": DEFAULTS3["rope_theta"]})  # transformers uses it in full layers only
    return spec(c, alternate_layers(c, 4, sliding, full))


def spec(c: Config, mixers: list[Attention]) -> DecoderSpec:
    norm = Norm(c["rms_norm_eps"], scale_in_fp32=True)
    qk_norm = replace(norm, over_all_heads=True)
    layers = (Layer(replace(mixer, qk_norm=qk_norm), mlp_spec(c), pre_norm=False, post_norm=True) for mixer in mixers)
    return decoder_spec(c, layers, norm=norm)


MOE_TABLE = (*EXPERTS, *ROUTER, *LLAMA)
MOE_DEFAULTS = DEFAULTS | {"max_position_embeddings": 4096, "norm_topk_prob": False, "num_experts_per_tok": 8}
MOE_DEFAULTS |= {"router_aux_loss_coef": 0.01}


def olmoe(config: Config) -> DecoderSpec:
    c = with_default_config(rename_keys(config, {"num_local_experts": "num_experts"}), **MOE_DEFAULTS)
    reject_config_values(c, {"clip_qkv": None})
    mixer = attention_spec(c, qk_norm=Norm(c["rms_norm_eps"], over_all_heads=True))
    moe = moe_spec(c, c["intermediate_size"], norm_topk_prob=c["norm_topk_prob"])
    return decoder_spec(c, [Layer(mixer, moe)] * c["num_hidden_layers"])
