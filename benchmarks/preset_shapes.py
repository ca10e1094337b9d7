"""Sizes of tensors that reach kernels, over all presets of tunekit."""

import json
from dataclasses import dataclass
from pathlib import Path

PRESETS = Path(__file__).resolve().parents[1] / "tunekit/models/presets"


@dataclass(frozen=True)
class PresetShapes:
    """Sizes in `tunekit/models/presets/*/config.json` that reach kernels."""

    norm_dims: frozenset[int]
    mlp_dims: frozenset[int]
    heads: frozenset[tuple[int, int, int]]  # number, channels, rotated channels
    vocab_sizes: frozenset[int]


def read_preset_shapes() -> PresetShapes:
    configs = [json.loads(file.read_text("utf-8")) for file in PRESETS.glob("*/config.json")]
    assert configs
    norm_dims, mlp_dims, heads, vocab_sizes = set(), set(), set(), set()
    for config in configs:
        number, groups = config["num_attention_heads"], config["num_key_value_heads"]
        channels = config.get("head_dim") or config["hidden_size"] // number
        names = "hidden_size", "q_lora_rank", "kv_lora_rank", "linear_value_head_dim"
        norm_dims |= {config[name] for name in names if config.get(name)} | {
            channels,
            channels * number,
            channels * groups,
        }
        names = "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"
        mlp_dims |= {config[name] for name in names if config.get(name)}
        if rotated := config.get("qk_rope_head_dim"):  # latent attention: one key, all channels of which are rotated
            heads |= {(number, config["qk_nope_head_dim"] + rotated, rotated), (1, rotated, rotated)}
        else:
            rotated = int(channels * config.get("partial_rotary_factor", 1.0))
            heads |= {(number, channels, rotated), (groups, channels, rotated)}
        vocab_sizes.add(config["vocab_size"])
    return PresetShapes(frozenset(norm_dims), frozenset(mlp_dims), frozenset(heads), frozenset(vocab_sizes))
