"""DeepSeek V2 and V3 and what has their plan, as Kimi K2: latent attention, and experts beside a shared one."""

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
from tunekit.models.families.moe import EXPERTS, HUB, OURS, ROUTER, moe_spec
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
USUAL = {"first_k_dense_replace": 3, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
USUAL |= {"n_group": 8, "topk_group": 4, "max_position_embeddings": 4096, "rope_interleave": True}
USUAL2 = USUAL | {"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0}
USUAL2 |= {"n_group": 1, "topk_group": 1, "max_position_embeddings": 2048}


def v3(config: Config) -> DecoderSpec:
    c = with_default_config(config, **USUAL)
    reject_config_values(c, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    return spec(c, corrected(c))


def v2(config: Config) -> DecoderSpec:
    """Scores are a softmax. The weights of the chosen ones are never made to add up to 1, whatever config.json says."""
    c = with_default_config(config, **USUAL2)
    reject_config_values(c, {"scoring_func": "softmax", "moe_layer_freq": 1})
    groups = groups_of(c) if c.get("topk_method") == "group_limited_greedy" else None
    return spec(c, beside_shared(c, score="softmax", normalize=False, groups=groups))


def spec(c: Config, moe: MoE) -> DecoderSpec:
    dense = c["first_k_dense_replace"]
    return decoder_spec(c, (Layer(mixer(c), mlp_spec(c) if i < dense else moe) for i in range(c["num_hidden_layers"])))


def corrected(c: Config) -> MoE:
    """Experts chosen by sigmoids and a correction, which training moves so that all of them have work."""
    choice = {"score": "sigmoid", "selection_bias": True, "groups": groups_of(c)}
    return beside_shared(c, normalize=bool(c["norm_topk_prob"]), **choice)


def beside_shared(c: Config, **changes: Any) -> MoE:
    hidden = c["moe_intermediate_size"]
    both = {"precise": True, "scale": c["routed_scaling_factor"], "shared": hidden * (c["n_shared_experts"] or 0)}
    return moe_spec(c, hidden, **both, **changes)


def groups_of(c: Config) -> tuple[int, int] | None:
    count, kept = c["n_group"], c["topk_group"]
    return None if count == kept else (count, kept)


def mixer(c: Config) -> LatentAttention:
    nope, turned = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    turns = replace(rope_from_config({**c, "head_dim": turned}), paired=bool(c["rope_interleave"]), keep_paired=False)
    p = rope_scaling_config(c)
    stretched = yarn_mscale(p["factor"], p["mscale_all_dim"]) if p.get("mscale_all_dim") and p.get("factor") else 1.0
    ranks = c["q_lora_rank"], c["kv_lora_rank"]
    dims = nope, turned, c["v_head_dim"]
    bias, scale = bool(c["attention_bias"]), (nope + turned) ** -0.5 * stretched**2
    return LatentAttention(c["num_attention_heads"], *ranks, *dims, turns, bias=bias, scale=scale)
