"""Granite, dense and MoE: Llama with multipliers on embeddings, residuals, attention scores and logits."""

from dataclasses import replace

from tunekit.models.families.base import LLAMA, Config, attention_spec, decoder_spec, mlp_spec, with_default_config
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
