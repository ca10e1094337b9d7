"""GLM-4, dense: interleaved RoPE in half of each head; GLM-4.5 and GLM-4.6: experts as in DeepSeek V3."""

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
from tunekit.models.families.deepseek import SHARED, sigmoid_moe
from tunekit.models.families.moe_base import EXPERTS, ROUTER
from tunekit.models.spec import DecoderSpec, Layer, Norm
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
    """GLM-4-0414: `glm` with norms after attention and MLP."""
    spec = glm(config)
    return replace(spec, layers=tuple(replace(layer, post_norm=True) for layer in spec.layers))


MOE_TABLE = (*EXPERTS, *SHARED, *ROUTER, *LLAMA)
MOE_DEFAULTS = {"first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
MOE_DEFAULTS |= {"n_group": 1, "topk_group": 1}
MOE_DEFAULTS |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
MOE_DEFAULTS |= {"partial_rotary_factor": 0.5, "use_qk_norm": False}


def glm4_moe(config: Config) -> DecoderSpec:
    """GLM-4.5 and GLM-4.6: grouped-query attention with the MoE of DeepSeek V3."""
    c = with_default_config(config, **MOE_DEFAULTS)
    norm = Norm(c["rms_norm_eps"]) if c["use_qk_norm"] else None
    mixer, moe = attention_spec(c, qk_norm=norm, out_bias=False), sigmoid_moe(c)
    dense = c["first_k_dense_replace"]
    return decoder_spec(c, (Layer(mixer, mlp_spec(c) if i < dense else moe) for i in range(c["num_hidden_layers"])))
