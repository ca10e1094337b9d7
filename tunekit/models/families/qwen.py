"""Qwen2, Qwen2.5 and Qwen3, dense and MoE, and the text model of multimodal ones."""

from typing import Any

from tunekit.models.families.base import (
    FULL,
    LLAMA,
    SLIDING,
    Config,
    attention_spec,
    decoder_spec,
    layer_types,
    mlp_spec,
    sliding_windows,
    text_model_table,
    with_default_config,
)
from tunekit.models.families.moe_base import EXPERTS, HUB, OURS, ROUTER, moe_spec
from tunekit.models.spec import MLP, DecoderSpec, Layer, MoE, Norm
from tunekit.models.weight_map import KeyRule

# Before transformers 4.52, the text model had the names of a text-only model; many files still do.
VISION = (*text_model_table(LLAMA, "visual"), *LLAMA)

DEFAULTS = {"max_position_embeddings": 32_768, "max_window_layers": 28, "num_key_value_heads": 32}
DEFAULTS |= {"sliding_window": 4096}
DEFAULTS2_VISION = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
DEFAULTS3_VISION = {"max_position_embeddings": 128_000, "rope_theta": 5e5}


def qwen2(config: Config, **overrides: Any) -> DecoderSpec:
    """Qwen2: biases on q, k and v, whatever config.json says."""
    c = with_default_config(config, **(DEFAULTS | overrides))
    return decoder_spec(
        c, (Layer(attention_spec(c, bias=True, out_bias=False, window=w), mlp_spec(c)) for w in sliding_windows(c))
    )


def qwen3(config: Config, **overrides: Any) -> DecoderSpec:
    """Qwen3: norms over each head of q and k."""
    c = with_default_config(config, head_dim=128, **(DEFAULTS | overrides))
    norm = Norm(c["rms_norm_eps"])
    return decoder_spec(c, (Layer(attention_spec(c, qk_norm=norm, window=w), mlp_spec(c)) for w in sliding_windows(c)))


def qwen2_vision(config: Config) -> DecoderSpec:
    """Text model of Qwen2-VL and Qwen2.5-VL."""
    return qwen2(config, **DEFAULTS2_VISION)


def qwen3_vision(config: Config) -> DecoderSpec:
    return qwen3(config, **DEFAULTS3_VISION)


MOE_TABLE = (
    *EXPERTS,
    *ROUTER,
    KeyRule(f"{OURS}.shared", f"{HUB}.shared_expert"),
    KeyRule(f"{OURS}.shared_gate", f"{HUB}.shared_expert_gate"),
    *LLAMA,
)
MOE_DEFAULTS = {"max_position_embeddings": 32_768, "decoder_sparse_step": 1, "norm_topk_prob": False}
MOE_DEFAULTS |= {"sliding_window": 4096}
MOE_DEFAULTS2 = MOE_DEFAULTS | {"num_key_value_heads": 16, "max_window_layers": 28, "qkv_bias": True}
MOE_DEFAULTS3 = MOE_DEFAULTS | {"num_key_value_heads": 4}


def qwen2_moe(config: Config) -> DecoderSpec:
    """Qwen2-MoE: a shared expert with a gate, in addition to the routed ones."""
    c = with_default_config(config, **MOE_DEFAULTS2)
    moe = moe_with_shared_gate(c)
    mixers = [attention_spec(c, bias=bool(c["qkv_bias"]), out_bias=False, window=w) for w in moe_sliding_windows(c)]
    return decoder_spec(c, (Layer(mixer, ffn(c, i, moe)) for i, mixer in enumerate(mixers)))


def moe_with_shared_gate(c: Config) -> MoE:
    """Experts, and a shared expert with a gate."""
    shared = {"shared_intermediate_size": c["shared_expert_intermediate_size"], "shared_gate": True}
    return moe_spec(c, c["moe_intermediate_size"], norm_topk_prob=c["norm_topk_prob"], **shared)


def qwen3_moe(config: Config) -> DecoderSpec:
    c = with_default_config(config, **MOE_DEFAULTS3)
    moe = moe_spec(c, c["moe_intermediate_size"], norm_topk_prob=c["norm_topk_prob"])
    window = c["sliding_window"] if c.get("use_sliding_window") else None
    mixer = attention_spec(c, qk_norm=Norm(c["rms_norm_eps"]), window=window)
    return decoder_spec(c, (Layer(mixer, ffn(c, i, moe)) for i in range(c["num_hidden_layers"])))


def ffn(c: Config, i: int, moe: MoE) -> MLP | MoE:
    """MoE in every n-th layer, except those in `mlp_only_layers`."""
    dense = i in (c.get("mlp_only_layers") or ()) or (i + 1) % c["decoder_sparse_step"]
    return mlp_spec(c) if dense else moe


def moe_sliding_windows(c: Config) -> list[int | None]:
    """Sliding window of each layer. Qwen2-MoE uses it in every second of the first layers, Qwen2 in all of the last."""
    window = c["sliding_window"] if c.get("use_sliding_window") else None
    default = [SLIDING if i < c["max_window_layers"] and i % 2 == 0 else FULL for i in range(c["num_hidden_layers"])]
    return [window if kind == SLIDING else None for kind in layer_types(c, default)]
