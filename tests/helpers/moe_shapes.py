"""Shapes of small models with experts, latent attention or layers of several kinds."""

from typing import Any

BASE = {"vocab_size": 67, "intermediate_size": 52, "num_hidden_layers": 3, "max_position_embeddings": 64}
BASE |= {"initializer_range": 0.03, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
HEADS = BASE | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}

MIXTRAL = HEADS | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN2 = HEADS | MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28}
QWEN3 = HEADS | MOE | {"model_type": "qwen3_moe", "head_dim": 12}
SPARSE = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
GPT_OSS = HEADS | {"model_type": "gpt_oss", "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2}
GPT_OSS |= {"sliding_window": 5, "intermediate_size": 32, "num_hidden_layers": 4}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SHARED |= {"first_k_dense_replace": 1}
OLMOE = HEADS | {"model_type": "olmoe", "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 20}
ERNIE = HEADS | {"model_type": "ernie4_5_moe", "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 20}
ERNIE |= {"num_hidden_layers": 4}
GRANITE = HEADS | {"model_type": "granitemoe", "num_local_experts": 5, "num_experts_per_tok": 2}
GRANITE |= {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.6}
GRANITE |= {"logits_scaling": 1.7, "tie_word_embeddings": True}
GLM = HEADS | SHARED | {"model_type": "glm4_moe", "head_dim": 12, "routed_scaling_factor": 1.7}
DEEPSEEK = BASE | SHARED | {"model_type": "deepseek_v3", "hidden_size": 48, "num_attention_heads": 4}
DEEPSEEK |= {"num_key_value_heads": 4, "q_lora_rank": 18, "kv_lora_rank": 14, "n_group": 4, "topk_group": 2}
DEEPSEEK |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
DEEPSEEK2 = DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
LLAMA4 = HEADS | {"model_type": "llama4_text", "head_dim": 12, "num_local_experts": 5, "intermediate_size_mlp": 36}
LLAMA4 |= {"attention_chunk_size": 8, "floor_scale": 4, "num_hidden_layers": 5}
GEMMA4 = HEADS | {"model_type": "gemma4_text", "head_dim": 12, "sliding_window": 5, "global_head_dim": 20}
GEMMA4 |= {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4, "pad_token_id": 0}
GEMMA4 |= {"vocab_size_per_layer_input": 67, "hidden_size_per_layer_input": 12, "final_logit_softcapping": 30.0}
GEMMA4_MOE = GEMMA4 | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4_MOE |= {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3}
GEMMA4_MOE |= {"moe_intermediate_size": 20, "attention_k_eq_v": True, "num_global_key_value_heads": 1}

GEMMA3N = HEADS | {"model_type": "gemma3n_text", "head_dim": 12, "sliding_window": 5, "num_hidden_layers": 5}
GEMMA3N |= {"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2}
GEMMA3N |= {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "pad_token_id": 0}
GEMMA3N |= {"altup_num_inputs": 3, "laurel_rank": 6, "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.0]}
GEMMA4_VISION = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA4_VISION |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8}
GEMMA4_AUDIO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 12}
GEMMA4_AUDIO |= {"subsampling_conv_channels": [4, 4]}
LLAMA4_VISION = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA4_VISION |= {"vision_output_dim": 16, "image_size": 28, "projector_input_dim": 16, "projector_output_dim": 16}

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "mixtral-sliding": MIXTRAL | {"sliding_window": 5, "tie_word_embeddings": True, "head_dim": 12},
    "qwen2-moe": QWEN2 | SPARSE | {"norm_topk_prob": False},
    "qwen2-moe-sliding": QWEN2 | SLIDING | {"max_window_layers": 2, "norm_topk_prob": True, "qkv_bias": False},
    "qwen3-moe": QWEN3 | {"norm_topk_prob": True},
    "qwen3-moe-sparse": QWEN3 | SPARSE | {"attention_bias": True, "norm_topk_prob": False},
    "qwen3-moe-sliding": QWEN3 | SLIDING | {"norm_topk_prob": True, "tie_word_embeddings": True},
    "gpt-oss": GPT_OSS | {"rope_parameters": YARN | {"rope_theta": 1.5e5, "truncate": False}},
    "gpt-oss-usual": GPT_OSS | {"attention_bias": False},
    "gpt-oss-limits": GPT_OSS | {"swiglu_limit": 0.8, "swiglu_alpha": 1.3},
    "olmoe": OLMOE,
    "ernie4.5-moe": ERNIE,
    "ernie4.5-moe-interval": ERNIE
    | {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    "granite-moe": GRANITE,
    "glm4-moe": GLM | {"attention_bias": True},
    "glm4-moe-norms": GLM | {"use_qk_norm": True, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    "deepseek-v3": DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek-v3-plain": DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "n_group": 1, "topk_group": 1},
    "deepseek-v3-halves": DEEPSEEK | {"rope_interleave": False, "rope_parameters": YARN | {"mscale_all_dim": 0.7}},
    "deepseek-v2": DEEPSEEK2 | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek-v2-greedy": DEEPSEEK2 | {"topk_method": "greedy", "q_lora_rank": None, "routed_scaling_factor": 1.5},
    "llama4": LLAMA4 | {"interleave_moe_layer_step": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "llama4-stretched": LLAMA4
    | {"num_experts_per_tok": 2, "use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layer_interval": 2}
    | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
       | {"high_freq_factor": 1.0, "original_max_position_embeddings": 16}},
    "gemma3n": GEMMA3N,
    "gemma3n-widths": GEMMA3N
    | {"intermediate_size": [52, 40, 52, 40, 36], "num_kv_shared_layers": 0, "altup_correct_scale": False}
    | {"tie_word_embeddings": False},
    "gemma4": GEMMA4,
    "gemma4-shared": GEMMA4 | {"num_kv_shared_layers": 4, "use_double_wide_mlp": True},
    "gemma4-moe": GEMMA4_MOE,
    "gemma4-moe-shared": GEMMA4_MOE | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6},
    "gemma4-vision": {"model_type": "gemma4", "text_config": GEMMA4 | {"num_kv_shared_layers": 4}}
    | {"vision_config": GEMMA4_VISION, "audio_config": GEMMA4_AUDIO},
    "gemma4-vision-moe": {"model_type": "gemma4", "text_config": GEMMA4_MOE, "vision_config": GEMMA4_VISION},
    "llama4-vision": {"model_type": "llama4", "text_config": LLAMA4, "vision_config": LLAMA4_VISION},
}  # fmt: skip
