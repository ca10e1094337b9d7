"""DeepSeek V2 and V3, and models with the same architecture (Kimi K2): latent attention, MoE with a shared expert."""

from dataclasses import replace
from typing import Any

from tunekit.models.families.base import (
    LLAMA,
    Config,
    decoder_spec,
    mlp_spec,
    reject_config_values,
    rope_from_config,
    rope_scaling_config,
    with_default_config,
    yarn_mscale,
)
from tunekit.models.families.moe_base import EXPERTS, HUB, OURS, ROUTER, moe_spec
from tunekit.models.spec import DecoderSpec, LatentAttention, Layer, MoE
from tunekit.models.weight_map import KeyRule

SHARED = (
    KeyRule(f"{OURS}.router.selection_bias", f"{HUB}.gate.e_score_correction_bias"),
    KeyRule(f"{OURS}.shared", f"{HUB}.shared_experts"),
)
TABLE = (
    *EXPERTS,
    *SHARED,
    *ROUTER,
    KeyRule("layers.{}.attn.q_a_norm", "model.layers.{}.self_attn.q_a_layernorm"),
    KeyRule("layers.{}.attn.kv_a_norm", "model.layers.{}.self_attn.kv_a_layernorm"),
    *LLAMA,
)
DEFAULTS = {"first_k_dense_replace": 3, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
DEFAULTS |= {"n_group": 8, "topk_group": 4, "max_position_embeddings": 4096, "rope_interleave": True}
DEFAULTS2 = DEFAULTS | {"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0}
DEFAULTS2 |= {"n_group": 1, "topk_group": 1, "max_position_embeddings": 2048}


def v3(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    reject_config_values(c, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    return spec(c, sigmoid_moe(c))


def v2(config: Config) -> DecoderSpec:
    """DeepSeek V2: softmax scores. Weights of the selected experts are never normalized, whatever config.json says."""
    c = with_default_config(config, **DEFAULTS2)
    reject_config_values(c, {"scoring_func": "softmax", "moe_layer_freq": 1})
    if c["first_k_dense_replace"] < c["num_hidden_layers"]:
        reject_config_values(c, {"mlp_bias": False})  # of shared experts
    groups = expert_groups(c) if c.get("topk_method") == "group_limited_greedy" else None
    return spec(c, moe_with_shared_expert(c, scoring_func="softmax", norm_topk_prob=False, groups=groups))


def spec(c: Config, moe: MoE) -> DecoderSpec:
    dense = c["first_k_dense_replace"]
    return decoder_spec(c, (Layer(mixer(c), mlp_spec(c) if i < dense else moe) for i in range(c["num_hidden_layers"])))


def sigmoid_moe(c: Config) -> MoE:
    """Experts selected by sigmoid scores and a load-balancing bias."""
    choice = {"scoring_func": "sigmoid", "selection_bias": True, "groups": expert_groups(c)}
    return moe_with_shared_expert(c, norm_topk_prob=bool(c["norm_topk_prob"]), **choice)


def moe_with_shared_expert(c: Config, **changes: Any) -> MoE:
    hidden = c["moe_intermediate_size"]
    fields = {
        "router_in_fp32": True,
        "router_aux_loss_coef": 0.0,
        "scale": c["routed_scaling_factor"],
        "shared_intermediate_size": hidden * (c["n_shared_experts"] or 0),
    }
    return moe_spec(c, hidden, **fields, **changes)


def expert_groups(c: Config) -> tuple[int, int] | None:
    count, top_k = c["n_group"], c["topk_group"]
    return None if count == top_k else (count, top_k)


def mixer(c: Config) -> LatentAttention:
    nope_dim, rope_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    rope = replace(
        rope_from_config({**c, "head_dim": rope_dim}), interleaved=bool(c["rope_interleave"]), interleaved_output=False
    )
    p = rope_scaling_config(c)
    mscale = yarn_mscale(p["factor"], p["mscale_all_dim"]) if p.get("mscale_all_dim") and p.get("factor") else 1.0
    ranks = c["q_lora_rank"], c["kv_lora_rank"]
    dims = nope_dim, rope_dim, c["v_head_dim"]
    bias, scale = bool(c["attention_bias"]), (nope_dim + rope_dim) ** -0.5 * mscale**2
    return LatentAttention(c["num_attention_heads"], *ranks, *dims, rope, bias=bias, scale=scale)
