"""Shapes of small models with recurrent mixers: gated delta nets, short convolutions and Mamba 2."""

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


HYBRID = {key: value for key, value in BASE.items() if key != "head_dim"} | {"hidden_size": 48, "pad_token_id": 0}
HYBRID |= {"rms_norm_eps": 1e-2}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 4, "mamba_expand": 1}
BAMBA = HYBRID | MAMBA | {"model_type": "bamba", "attn_layer_indices": [1]}
GRANITE = HYBRID | MAMBA | {"model_type": "granitemoehybrid", "num_local_experts": 5, "num_experts_per_tok": 2}
GRANITE |= {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7}
GRANITE |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_intermediate_size": 24}
FALCON = HYBRID | MAMBA | {"model_type": "falcon_h1", "mamba_d_ssm": None}
MULTIPLIERS = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.7, "mlp_multipliers": [0.8, 1.4]}
MULTIPLIERS |= {"key_multiplier": 0.6, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2}
MULTIPLIERS |= {"ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.6], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8}
NEMOTRON = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 52, "max_position_embeddings": 64}
NEMOTRON |= {"initializer_range": 0.03, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
NEMOTRON |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "layer_norm_epsilon": 1e-3}
NEMOTRON |= {"mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4}
NEMOTRON |= {"model_type": "nemotron_h", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.7, "time_step_min": 1e-9}
NEMOTRON |= {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]}


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
    "bamba": BAMBA,
    "bamba-biases": BAMBA
    | {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True, "mamba_d_conv": 2}
    | {"tie_word_embeddings": True, "mamba_n_groups": 1},
    "granite4": GRANITE,
    "granite4-dense": GRANITE
    | {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
    "falcon-h1": FALCON | MULTIPLIERS,
    "falcon-h1-norm": FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    "falcon-h1-norm-first": FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "projectors_bias": True},
    "nemotron-h": NEMOTRON,
    "nemotron-h-dense": NEMOTRON
    | {"layers_block_type": ["mlp", "linear_attention", "full_attention"], "mlp_bias": True, "use_bias": True}
    | {"use_conv_bias": False},
    "nemotron-h-groups": NEMOTRON
    | {
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
    },
    "qwen3.5-vision": wrap_in_multimodal(QWEN | {"rope_parameters": MROPE}),
    "qwen3.5-vision-tied": wrap_in_multimodal(QWEN | EQUAL | {"rope_parameters": MROPE, "tie_word_embeddings": True}),
    "qwen3.5-moe-vision": wrap_in_multimodal(SPARSE | {"rope_parameters": MROPE}),
}
