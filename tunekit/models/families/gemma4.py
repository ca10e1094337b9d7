"""Gemma 4 text model: shared keys and values, per-layer embeddings, experts in parallel with the dense layer."""

from dataclasses import replace
from typing import Any

from tunekit.models.families.base import (
    FULL,
    LLAMA,
    SANDWICH,
    SLIDING,
    Config,
    all_but_every_nth,
    attention_spec,
    decoder_spec,
    layer_types,
    mlp_spec,
    reject_config_values,
    rope_for_layer_type,
    text_model_table,
    with_default_config,
)
from tunekit.models.families.moe_base import moe_spec, stacked_expert_table
from tunekit.models.spec import Attention, DecoderSpec, DenseMoE, Layer, LinearScaling, Norm, PerLayerInput, Rope
from tunekit.models.weight_map import HubOnly, KeyRule

LAYER, HUB = "layers.{}", "model.layers.{}"
TOKEN = (
    KeyRule("per_layer.embed", "model.embed_tokens_per_layer"),
    KeyRule("per_layer.proj", "model.per_layer_model_projection"),
    KeyRule("per_layer.norm", "model.per_layer_projection_norm"),
    KeyRule(f"{LAYER}.token.per_layer_input_gate", f"{HUB}.per_layer_input_gate"),
    KeyRule(f"{LAYER}.token.per_layer_projection", f"{HUB}.per_layer_projection"),
    KeyRule(f"{LAYER}.token.norm", f"{HUB}.post_per_layer_input_norm"),
    KeyRule(f"{LAYER}.layer_scalar", f"{HUB}.layer_scalar"),
)
TABLE = (*TOKEN, *SANDWICH, *LLAMA)
VISION = text_model_table(TABLE, "vision_tower", "embed_vision", "audio_tower", "embed_audio")
SPARSE = (
    *stacked_expert_table(f"{LAYER}.mlp.sparse.experts", f"{HUB}.experts"),
    KeyRule(f"{LAYER}.mlp.sparse.router.weight", f"{HUB}.router.proj.weight"),
    KeyRule(f"{LAYER}.mlp.sparse.router", f"{HUB}.router"),
    KeyRule(f"{LAYER}.mlp.dense_norm", f"{HUB}.pre_feedforward_layernorm"),
    KeyRule(f"{LAYER}.mlp.dense_post_norm", f"{HUB}.post_feedforward_layernorm_1"),
    KeyRule(f"{LAYER}.mlp.sparse_norm", f"{HUB}.pre_feedforward_layernorm_2"),
    KeyRule(f"{LAYER}.mlp.sparse_post_norm", f"{HUB}.post_feedforward_layernorm_2"),
    KeyRule(f"{LAYER}.mlp.dense", f"{HUB}.mlp"),
)
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "hidden_activation": "gelu_pytorch_tanh"}
DEFAULTS |= {"max_position_embeddings": 131_072, "sliding_window": 512, "tie_word_embeddings": True}
DEFAULTS |= {"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0}
DEFAULTS |= {"attention_k_eq_v": False, "enable_moe_block": False, "use_double_wide_mlp": False}
DEFAULTS |= {"rope_parameters": ROPES, "partial_rotary_factor": 1.0}


def spec(config: Config) -> DecoderSpec:
    c = with_layer_types(config)
    # "vision" is causal for text
    reject_config_values(c, {"use_bidirectional_attention": "vision", "rope_scaling": None})
    reject_config_values(c, {"partial_rotary_factor": 1.0})  # only those in rope_parameters are read
    sources, norm = kv_sources(c), Norm(c["rms_norm_eps"], scale_in_fp32=True)
    dense = mlp_spec(c)
    wide = replace(dense, intermediate_size=2 * dense.intermediate_size) if c["use_double_wide_mlp"] else dense

    def layer(i: int, kind: str) -> Layer:
        ffn = dense if sources[i] is None else wide
        ffn = DenseMoE(ffn, experts(c), norm) if c["enable_moe_block"] else ffn
        return Layer(mixer(c, i, kind, kv_shared_layer=sources[i]), ffn, post_norm=True, scaled=True)

    extra = c["hidden_size_per_layer_input"]
    return decoder_spec(
        c,
        map(layer, range(len(c["layer_types"])), c["layer_types"]),
        norm=norm,
        embed_scale=c["hidden_size"] ** 0.5,
        logit_softcap=c.get("final_logit_softcapping"),
        per_layer=PerLayerInput(c["vocab_size_per_layer_input"], extra, dense.act) if extra else None,
    )


def with_layer_types(config: Config) -> dict[str, Any]:
    """config.json with `layer_types`, in which the last layer always has full attention."""
    c = with_default_config(config, **DEFAULTS)
    types = [*layer_types(c, all_but_every_nth(6, c))[:-1], FULL]
    return c | {"hidden_act": c["hidden_activation"], "layer_types": types}


def kv_sources(c: Config) -> list[int | None]:
    """Layer whose keys and values each layer reuses: the last one of its type that has its own; None for the others."""
    types, count = c["layer_types"], c["num_hidden_layers"] - c["num_kv_shared_layers"]
    last_layers = {kind: i for i, kind in enumerate(types[:count])}
    if missing := set(types) - set(last_layers):
        raise ValueError(
            f"num_kv_shared_layers {c['num_kv_shared_layers']}: no {missing.pop()} layer has its own keys and values"
        )
    return [None if i < count else last_layers[kind] for i, kind in enumerate(types)]


def mixer(c: Config, i: int, kind: str, **changes: Any) -> Attention:
    full = kind == FULL
    overrides = {"head_dim": c["global_head_dim"]} if full else {}
    if full and c["attention_k_eq_v"] and c.get("num_global_key_value_heads"):
        overrides["num_key_value_heads"] = c["num_global_key_value_heads"]
    if "per_layer_config" in c:  # written by transformers >= 5.10 instead of the two values above
        overrides = c["per_layer_config"].get(str(i), {})
    c, norm = {**c, **overrides}, Norm(c["rms_norm_eps"], scale_in_fp32=True)
    values = {"v_norm": Norm(c["rms_norm_eps"], weight=False), "attention_k_eq_v": full and c["attention_k_eq_v"]}
    window = None if full else c["sliding_window"]
    return attention_spec(c, rope=rope(c, kind), qk_norm=norm, scale=1.0, window=window, **values, **changes)


def rope(c: Config, kind: str) -> Rope:
    p, head = c["rope_parameters"].get(kind) or {}, c["head_dim"]
    if p.get("rope_type") != "proportional":
        reject_config_values(p, {"partial_rotary_factor": 1.0})
        return rope_for_layer_type(c, kind)
    rotary_fraction, factor = p.get("partial_rotary_factor") or 1.0, p.get("factor") or 1.0
    scaling = None if factor == 1.0 else LinearScaling(factor)
    return Rope(p["rope_theta"], 2 * int(rotary_fraction * head // 2), scaling, pad=rotary_fraction < 1.0)


def experts(c: Config) -> Any:
    per_token = {"num_experts_per_tok": c["top_k_experts"]}
    router = {"router_norm": Norm(c["rms_norm_eps"], weight=False), "router_aux_loss_coef": 0.0}
    return moe_spec({**c, **per_token}, c["moe_intermediate_size"], **router)


def config_table(config: Config) -> tuple[KeyRule, ...]:
    """Names of experts, if any, and of unused weights."""
    c = with_layer_types(config)
    return unused_kv_table(c) + (SPARSE if c["enable_moe_block"] else ())


def unused_kv_table(c: Config) -> tuple[KeyRule, ...]:
    """Files may contain unused k and v weights of layers that reuse those of others."""
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    shared = [i for i, source in enumerate(kv_sources(c)) if source is not None]
    return tuple(KeyRule((), f"model.layers.{i}.self_attn.{name}", HubOnly()) for i in shared for name in names)
