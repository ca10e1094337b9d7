"""Shared by hybrids of Mamba 2 and attention: weight names, layer types and the spec of the mixer."""

from typing import Any

from tunekit.models.families.base import FULL, Config, reject_config_values
from tunekit.models.spec import Mamba2, Norm
from tunekit.models.weight_map import KeyRule

LINEAR = "linear_attention"  # layer type of Mamba 2 in config.json
UNLIMITED = (float("inf"), {"__float__": "Infinity"})  # the second one is written by transformers 5
OLD_TYPES = {"mamba": LINEAR, "attention": FULL}  # names in published files
LEAVES = ("in_proj", "conv1d", "A_log", "dt_bias", "D", "norm", "out_proj")
MAMBA = tuple(KeyRule(f"layers.{{}}.attn.{leaf}", f"model.layers.{{}}.mamba.{leaf}") for leaf in LEAVES)
DEFAULTS = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
DEFAULTS |= {"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False}


def mamba_spec(c: Config, **changes: Any) -> Mamba2:
    """Mamba 2 mixer from keys with the prefix `mamba_`."""
    check_time_steps(c)
    reject_config_values(c, {"hidden_act": "silu"})  # also the activation of the convolution
    heads, inner = c["mamba_n_heads"], c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
    size = inner // heads if c["mamba_d_head"] == "auto" else c["mamba_d_head"]
    if size * heads != inner:
        raise ValueError(f"mamba_n_heads {heads} heads of mamba_d_head {size} channels do not give {inner} channels")
    fields = {
        "conv_bias": bool(c["mamba_conv_bias"]),
        "bias": bool(c["mamba_proj_bias"]),
        "out_bias": bool(c["mamba_proj_bias"]),
        "norm": Norm(c["rms_norm_eps"]),
    }
    sizes = heads, size, c["mamba_n_groups"], c["mamba_d_state"], c["mamba_d_conv"]
    return Mamba2(*sizes, **(fields | changes))


def check_time_steps(c: Config) -> None:
    """Raise ValueError if step sizes are limited."""
    limit = c.get("time_step_limit")
    if limit is not None and (len(limit) != 2 or limit[0] != 0 or limit[1] not in UNLIMITED):
        raise ValueError(f"time_step_limit {limit} is not supported, only [0.0, Infinity]")


def hybrid_layer_types(types: list[str]) -> list[str]:
    """Layer types with their current names."""
    return [OLD_TYPES.get(kind, kind) for kind in types]
