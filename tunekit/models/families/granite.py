"""Granite, dense, MoE and hybrid: Llama with multipliers on embeddings, residuals, attention scores and logits."""

from dataclasses import replace

from tunekit.models.families import mamba_base
from tunekit.models.families.base import (
    FULL,
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    layer_types,
    mlp_spec,
    rename_keys,
    with_default_config,
)
from tunekit.models.families.moe_base import OURS, moe_spec, stacked_expert_table
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weight_map import Fused, KeyRule

DEFAULTS = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0}


def granite(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    layer = Layer(attention_spec(c, scale=c["attention_multiplier"]), mlp_spec(c))
    return decoder_spec(
        c,
        [layer] * c["num_hidden_layers"],
        embed_scale=c["embedding_multiplier"],
        residual_scale=c["residual_multiplier"],
        logit_scale=1 / c["logits_scaling"],
    )


HUB = "model.layers.{}.block_sparse_moe"
EXPERTS = f"{OURS}.experts"
LIVE = (*stacked_expert_table(EXPERTS, f"{HUB}.experts"), KeyRule(f"{OURS}.router", f"{HUB}.router"))
TABLE = (
    KeyRule((f"{EXPERTS}.gate_proj", f"{EXPERTS}.up_proj"), f"{HUB}.input_linear", Fused(dim=1)),
    KeyRule(f"{EXPERTS}.down_proj", f"{HUB}.output_linear"),
    KeyRule(f"{OURS}.router", f"{HUB}.router.layer"),
    *LIVE,
    *LLAMA,
)
MOE_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


def granite_moe(config: Config) -> DecoderSpec:
    """Experts instead of dense layers. A softmax over the selected ones equals a normalized softmax over all."""
    dense, c = granite(config), with_default_config(config, **MOE_DEFAULTS)
    moe = moe_spec(c, c["intermediate_size"])
    return replace(dense, layers=tuple(replace(layer, ffn=moe) for layer in dense.layers))


HYBRID_TABLE = (*mamba_base.MAMBA, *TABLE)
HYBRID_DEFAULTS = MOE_DEFAULTS | mamba_base.DEFAULTS | {"shared_intermediate_size": 1024}


def hybrid(config: Config) -> DecoderSpec:
    """Granite 4: Mamba 2 with attention in some layers, and a shared expert with or without routed ones."""
    config = rename_keys(config, {"layers_block_type": "layer_types"})
    c, position = with_default_config(config, **HYBRID_DEFAULTS), config.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise ValueError(f"position_embedding_type {position!r} is not supported, only nope and rope")
    base, shared = granite(c), c["shared_intermediate_size"]
    attention = attention_spec(c, scale=c["attention_multiplier"])
    attention = attention if position == "rope" else replace(attention, rope=None)
    ffn = mlp_spec(c | {"intermediate_size": shared, "mlp_bias": False})
    if has_experts(c):
        ffn = moe_spec(c, c["intermediate_size"], shared_intermediate_size=shared)
    types = mamba_base.hybrid_layer_types(c.get("layer_types") or [])
    types = layer_types(c | {"layer_types": types}, [mamba_base.LINEAR] * len(base.layers), mamba_base.LINEAR)
    mamba = mamba_base.mamba_spec(c) if mamba_base.LINEAR in types else None
    return replace(base, layers=tuple(Layer(attention if kind == FULL else mamba, ffn) for kind in types))


def has_experts(config: Config) -> bool:
    return with_default_config(config, **MOE_DEFAULTS)["num_local_experts"] > 0


def hybrid_config_table(config: Config) -> tuple[KeyRule, ...]:
    """Names of the shared expert, which is the feed-forward layer if there are no others."""
    ours, hub = f"{OURS}.shared" if has_experts(config) else OURS, "model.layers.{}.shared_mlp"
    gate_up = KeyRule((f"{ours}.gate_proj", f"{ours}.up_proj"), f"{hub}.input_linear", Fused())
    return gate_up, KeyRule(f"{ours}.down_proj", f"{hub}.output_linear")
