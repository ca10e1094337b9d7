"""Qwen3-Next and Qwen3.5: three gated delta nets per gated attention layer; dense or with experts in every layer."""

from collections.abc import Callable

from tunekit.models.families.base import (
    FULL,
    LLAMA,
    Config,
    all_but_every_nth,
    attention_spec,
    decoder_spec,
    layer_types,
    mlp_spec,
    reject_config_values,
    text_model_table,
    with_default_config,
)
from tunekit.models.families.qwen import MOE_TABLE, ffn, moe_with_shared_gate
from tunekit.models.spec import DecoderSpec, DeltaNet, FeedForward, Layer, Norm
from tunekit.models.weight_map import KeyRule, MultiTokenPrediction

LINEAR = "linear_attention"  # layer type of a delta net in config.json
LEAVES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba")
LEAVES += ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
NET = tuple(KeyRule(f"layers.{{}}.attn.{leaf}", f"model.layers.{{}}.linear_attn.{leaf}") for leaf in LEAVES)
MTP = (KeyRule((), "mtp", MultiTokenPrediction()),)  # multi-token prediction: not loaded, but kept for other programs
TABLE = (*NET, *MOE_TABLE, *MTP)
DENSE = (*NET, *LLAMA, *MTP)

DEFAULTS = {"max_position_embeddings": 32_768, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25}
DEFAULTS |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
DEFAULTS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4}
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1}
EXPERTS |= {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS, **EXPERTS)
    return hybrid(c, lambda i: ffn(c, i, moe_with_shared_gate(c)), grouped=True)


def hybrid(c: Config, make_ffn: Callable[[int], FeedForward], grouped: bool = False) -> DecoderSpec:
    """Delta nets with attention in every n-th layer. `make_ffn` returns the feed-forward spec of a layer."""
    reject_config_values(c, {"hidden_act": "silu", "attn_output_gate": True})
    norm = Norm(c["rms_norm_eps"], offset=1.0)
    net = DeltaNet(
        k_heads=c["linear_num_key_heads"],
        v_heads=c["linear_num_value_heads"],
        k_dim=c["linear_key_head_dim"],
        v_dim=c["linear_value_head_dim"],
        conv=c["linear_conv_kernel_dim"],
        norm=Norm(c["rms_norm_eps"]),
        grouped=grouped,
    )
    mixers = {LINEAR: net, FULL: attention_spec(c, qk_norm=norm, output_gate=True)}
    types = layer_types(c, all_but_every_nth(c["full_attention_interval"], c, LINEAR), LINEAR)
    layers = (Layer(mixers[kind], make_ffn(i)) for i, kind in enumerate(types))
    return decoder_spec(c, layers, norm=norm)


# A text model that transformers extracted from a multimodal one keeps its names.
TEXT, MOE_TEXT = (*DENSE, *text_model_table(DENSE, "visual")), (*TABLE, *text_model_table(TABLE, "visual"))
VISION, MOE_VISION = text_model_table(DENSE, "visual"), text_model_table(TABLE, "visual")
EXPERTS3_5 = EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8}


def dense(config: Config) -> DecoderSpec:
    """Qwen3.5, dense."""
    c = with_default_config(config, **(DEFAULTS | {"num_key_value_heads": 4}))
    return hybrid(c, lambda _: mlp_spec(c))


def moe(config: Config) -> DecoderSpec:
    """Qwen3.5 with MoE in every layer, with normalized weights."""
    c = with_default_config(config, **DEFAULTS, **EXPERTS3_5)
    return hybrid(c, lambda _: moe_with_shared_gate(c))
