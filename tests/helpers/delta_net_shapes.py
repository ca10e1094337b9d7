"""Shapes of small models with recurrent mixers: gated delta nets and short convolutions."""

from typing import Any

BASE = {"vocab_size": 67, "intermediate_size": 52, "num_hidden_layers": 3, "max_position_embeddings": 64}
BASE |= {"initializer_range": 0.03, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
BASE |= {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
# Outputs of a state may be small, which amplifies rounding in the norm after it; a large eps avoids that.
BASE |= {"rms_norm_eps": 1e-3}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 10,
}
DELTA_NET |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
NEXT = BASE | DELTA_NET | MOE | {"model_type": "qwen3_next", "rope_parameters": ROPE}
QWEN = BASE | DELTA_NET | {"model_type": "qwen3_5_text", "rope_parameters": ROPE}
SPARSE = {key: value for key, value in (QWEN | MOE).items() if key != "intermediate_size"}
SPARSE |= {"model_type": "qwen3_5_moe_text"}
EQUAL = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 16}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
VISION |= {"out_hidden_size": 40, "num_position_embeddings": 16}
MROPE = ROPE | {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


LFM2 = {key: value for key, value in BASE.items() if key not in ("rms_norm_eps", "head_dim")}
LFM2 |= {"model_type": "lfm2", "hidden_size": 48, "norm_eps": 1e-3, "block_multiple_of": 4, "pad_token_id": 0}
LFM2 |= {"layer_types": ["conv", "full_attention", "conv"]}


def wrap_in_multimodal(shape: dict[str, Any]) -> dict[str, Any]:
    """Config of a multimodal model with this text model."""
    outer = {"model_type": shape["model_type"].removesuffix("_text"), "vision_config": VISION}
    return outer | {"text_config": shape, "tie_word_embeddings": shape.get("tie_word_embeddings", False)}


DELTA: dict[str, dict[str, Any]] = {
    "qwen3-next": NEXT,
    "qwen3-next-mixed": NEXT
    | {"num_hidden_layers": 5, "layer_types": None, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    | {"norm_topk_prob": False, "attention_bias": True, "linear_conv_kernel_dim": 3},
    "qwen3.5": QWEN,
    "qwen3.5-tied": QWEN | EQUAL | {"tie_word_embeddings": True, "num_hidden_layers": 4, "layer_types": None},
    "qwen3.5-yarn": QWEN | {"rope_parameters": YARN, "linear_conv_kernel_dim": 2, "attention_bias": True},
    "qwen3.5-moe": SPARSE,
    "lfm2": LFM2,
    "lfm2-biases": LFM2
    | {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
    "qwen3.5-moe-tied": SPARSE | EQUAL | {"tie_word_embeddings": True, "rope_parameters": ROPE | {"rope_theta": 1e4}},
    "qwen3.5-vision": wrap_in_multimodal(QWEN | {"rope_parameters": MROPE}),
    "qwen3.5-vision-tied": wrap_in_multimodal(QWEN | EQUAL | {"rope_parameters": MROPE, "tie_word_embeddings": True}),
    "qwen3.5-moe-vision": wrap_in_multimodal(SPARSE | {"rope_parameters": MROPE}),
}
