"""Sizes on which kernels depend, over all presets of tunekit."""

import json
from dataclasses import dataclass
from pathlib import Path

PRESETS = Path(__file__).resolve().parents[1] / "tunekit/models/presets"


@dataclass(frozen=True)
class PresetShapes:
    """Sizes in `tunekit/models/presets/*/config.json` on which kernels depend."""

    norm_dims: frozenset[int]
    mlp_dims: frozenset[int]
    heads: frozenset[tuple[int, int, int]]  # number, head_dim, channels with RoPE
    vocab_sizes: frozenset[int]


def read_preset_shapes() -> PresetShapes:
    configs = [json.loads(file.read_text("utf-8")) for file in PRESETS.glob("*/config.json")]
    assert configs
    norm_dims, mlp_dims, heads, vocab_sizes = set(), set(), set(), set()
    for config in configs:
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        names = "hidden_size", "q_lora_rank", "kv_lora_rank", "linear_value_head_dim"
        norm_dims |= {config[name] for name in names if config.get(name)} | {
            head_dim,
            head_dim * num_heads,
            head_dim * num_kv_heads,
        }
        names = "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"
        mlp_dims |= {config[name] for name in names if config.get(name)}
        if rope_dim := config.get("qk_rope_head_dim"):  # multi-head latent attention: one key, only with RoPE channels
            heads |= {(num_heads, config["qk_nope_head_dim"] + rope_dim, rope_dim), (1, rope_dim, rope_dim)}
        else:
            rope_dim = int(head_dim * config.get("partial_rotary_factor", 1.0))
            heads |= {(num_heads, head_dim, rope_dim), (num_kv_heads, head_dim, rope_dim)}
        vocab_sizes.add(config["vocab_size"])
    return PresetShapes(frozenset(norm_dims), frozenset(mlp_dims), frozenset(heads), frozenset(vocab_sizes))
