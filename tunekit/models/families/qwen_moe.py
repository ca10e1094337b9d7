"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE."""

from tunekit.models.families.base import (
    FULL,
    LLAMA,
    SLIDING,
    Config,
    attention_spec,
    decoder_spec,
    layer_types,
    mlp_spec,
    with_default_config,
)
from tunekit.models.families.moe import EXPERTS, HUB, OURS, ROUTER, moe_spec
from tunekit.models.spec import MLP, DecoderSpec, Layer, MoE, Norm
from tunekit.models.weight_map import KeyRule

TABLE = (
    *EXPERTS,
    *ROUTER,
    KeyRule(f"{OURS}.shared", f"{HUB}.shared_expert"),
    KeyRule(f"{OURS}.shared_gate", f"{HUB}.shared_expert_gate"),
    *LLAMA,
)
DEFAULTS = {
    "max_position_embeddings": 32_768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "sliding_window": 4096,
}
DEFAULTS2 = DEFAULTS | {"num_key_value_heads": 16, "max_window_layers": 28, "qkv_bias": True}
DEFAULTS3 = DEFAULTS | {"num_key_value_heads": 4}


def qwen2(config: Config) -> DecoderSpec:
    """Qwen2-MoE: a shared expert with a gate, in addition to the routed ones."""
    c = with_default_config(config, **DEFAULTS2)
    shared = {"shared_intermediate_size": c["shared_expert_intermediate_size"], "shared_gate": True}
    moe = moe_spec(c, c["moe_intermediate_size"], norm_topk_prob=c["norm_topk_prob"], **shared)
    mixers = [attention_spec(c, bias=bool(c["qkv_bias"]), out_bias=False, window=w) for w in sliding_windows(c)]
    return decoder_spec(c, (Layer(mixer, ffn(c, i, moe)) for i, mixer in enumerate(mixers)))


def qwen3(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS3)
    moe = moe_spec(c, c["moe_intermediate_size"], norm_topk_prob=c["norm_topk_prob"])
    window = c["sliding_window"] if c.get("use_sliding_window") else None
    mixer = attention_spec(c, qk_norm=Norm(c["rms_norm_eps"]), window=window)
    return decoder_spec(c, (Layer(mixer, ffn(c, i, moe)) for i in range(c["num_hidden_layers"])))


def ffn(c: Config, i: int, moe: MoE) -> MLP | MoE:
    """MoE in every n-th layer, except those in `mlp_only_layers`."""
    dense = i in (c.get("mlp_only_layers") or ()) or (i + 1) % c["decoder_sparse_step"]
    return mlp_spec(c) if dense else moe


def sliding_windows(c: Config) -> list[int | None]:
    """Sliding window of each layer. Qwen2-MoE uses it in every second of the first layers, Qwen2 in all of the last."""
    window = c["sliding_window"] if c.get("use_sliding_window") else None
    default = [SLIDING if i < c["max_window_layers"] and i % 2 == 0 else FULL for i in range(c["num_hidden_layers"])]
    return [window if kind == SLIDING else None for kind in layer_types(c, default)]
