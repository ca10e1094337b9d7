"""Granite with experts in place of its feed-forward layers."""

from dataclasses import replace

from tunekit.models.families import granite
from tunekit.models.families.base import LLAMA, Config, complete
from tunekit.models.families.moe import OURS, sparse, stacked
from tunekit.models.spec import DecoderSpec
from tunekit.models.weights import Fused, Row

HUB = "model.layers.{}.block_sparse_moe"
EXPERTS = f"{OURS}.experts"
LIVE = (*stacked(EXPERTS, f"{HUB}.experts"), Row(f"{OURS}.router", f"{HUB}.router"))
TABLE = (
    Row((f"{EXPERTS}.gate_proj", f"{EXPERTS}.up_proj"), f"{HUB}.input_linear", Fused(dim=1)),
    Row(f"{EXPERTS}.down_proj", f"{HUB}.output_linear"),
    Row(f"{OURS}.router", f"{HUB}.router.layer"),
    *LIVE,
    *LLAMA,
)
USUAL = {"num_local_experts": 8, "num_experts_per_tok": 2}


def spec(config: Config) -> DecoderSpec:
    """A softmax over the chosen experts alone is one over all of them, made to add up to 1."""
    dense, c = granite.spec(config), complete(config, **USUAL)
    moe = sparse(c, c["intermediate_size"])
    return replace(dense, layers=tuple(replace(layer, ffn=moe) for layer in dense.layers))
