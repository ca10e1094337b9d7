"""Granite with experts instead of dense feed-forward layers."""

from dataclasses import replace

from tunekit.models.families import granite
from tunekit.models.families.base import LLAMA, Config, with_default_config
from tunekit.models.families.moe import OURS, moe_spec, stacked_expert_table
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import Fused, KeyRule

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
DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


def spec(config: Config) -> DecoderSpec:
    """A softmax over the selected experts equals a softmax over all of them, normalized to sum to 1."""
    dense, c = granite.spec(config), with_default_config(config, **DEFAULTS)
    moe = moe_spec(c, c["intermediate_size"])
    return replace(dense, layers=tuple(replace(layer, ffn=moe) for layer in dense.layers))
