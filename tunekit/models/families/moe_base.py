"""Shared by MoE families: names of experts and routers, the MoE spec, and layers that are not loaded."""

from typing import Any

from tunekit.models.families.base import Config, activation
from tunekit.models.spec import MoE
from tunekit.models.weight_map import Fused, Identity, KeyRule, MultiTokenPrediction, Stack, Transposed

OURS, HUB = "layers.{}.mlp", "model.layers.{}.mlp"


def expert_table(
    ours: str, hub: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[KeyRule, ...]:
    """Rules for one tensor per expert with the published `names`, and for stacked tensors of transformers 5."""
    leaves = ("gate_proj", "up_proj", "down_proj")
    single = (KeyRule(f"{ours}.{leaf}", f"{hub}.*.{name}", Stack()) for leaf, name in zip(leaves, names, strict=True))
    return (*single, *stacked_expert_table(ours, hub))


def stacked_expert_table(
    ours: str, hub: str, transposed: bool = False, interleaved: bool = False
) -> tuple[KeyRule, ...]:
    """Rules for stacked expert tensors with fused gate and up projections."""
    gate_up = f"{ours}.gate_proj.weight", f"{ours}.up_proj.weight"
    down = Transposed() if transposed else Identity()
    return (
        KeyRule(gate_up, f"{hub}.gate_up_proj", Fused(dim=1, interleaved=interleaved, transposed=transposed)),
        KeyRule(f"{ours}.down_proj.weight", f"{hub}.down_proj", down),
    )


EXPERTS = expert_table(f"{OURS}.experts", f"{HUB}.experts")
ROUTER = (KeyRule(f"{OURS}.router", f"{HUB}.gate"),)
DEFAULT_AUX_LOSS_COEF = 0.001  # of transformers, in nearly all families
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # one key, by family


def moe_spec(c: Config, hidden: int, **changes: Any) -> MoE:
    """MoE of experts with `hidden` channels. Without a load-balancing loss in transformers, `changes` turn it off."""
    count, top_k = next((c[key] for key in NUM_EXPERTS_KEYS if c.get(key)), None), c["num_experts_per_tok"]
    if count is None:
        raise ValueError(f"number of experts is missing: set one of {', '.join(NUM_EXPERTS_KEYS)}")
    if top_k > count:
        raise ValueError(f"num_experts_per_tok {top_k} must be <= the number of experts, {count}")
    values: dict[str, Any] = {"act": activation(c)} | changes
    if c.get("output_router_logits"):
        values.setdefault("router_aux_loss_coef", c.get("router_aux_loss_coef", DEFAULT_AUX_LOSS_COEF) or 0.0)
    return MoE(count, top_k, hidden, **values)


def mtp_layers(c: Config) -> tuple[KeyRule, ...]:
    """Multi-token prediction layers after the last one. They are not loaded, but kept for other programs."""
    count = c.get("num_nextn_predict_layers") or c.get("num_mtp_layers") or 1
    first = c["num_hidden_layers"]
    return tuple(KeyRule((), f"model.layers.{i}", MultiTokenPrediction()) for i in range(first, first + count))
