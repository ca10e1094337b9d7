"""config.json of published mixture-of-experts checkpoints, in the format of the dense ones."""

from typing import Any

DEEPSEEK = {"model_type": "deepseek_v3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000}
DEEPSEEK |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK |= {"moe_layer_freq": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEEPSEEK |= {"attention_bias": False, "tie_word_embeddings": False, "pretraining_tp": 1}
YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 4096}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
GPT_OSS |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "rms_norm_eps": 1e-5, "sliding_window": 128}
GPT_OSS |= {"num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0, "attention_bias": True}
GPT_OSS |= {"initial_context_length": 4096, "max_position_embeddings": 131072, "rope_theta": 150000}
GPT_OSS |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
            | {"original_max_position_embeddings": 4096, "truncate": False}}  # fmt: skip
GLM = {"model_type": "glm4_moe", "vocab_size": 151552, "head_dim": 128, "num_attention_heads": 96, "n_group": 1}
GLM |= {"topk_group": 1, "num_key_value_heads": 8, "n_shared_experts": 1, "num_experts_per_tok": 8}
GLM |= {"norm_topk_prob": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None}
GLM |= {"attention_bias": True, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072}
QWEN3 = {"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128}
QWEN3 |= {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN3 |= {"rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False}
QWEN3 |= {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
LLAMA4 = {"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384}
LLAMA4 |= {"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
LLAMA4 |= {"vocab_size": 202048, "num_experts_per_tok": 1, "attention_chunk_size": 8192, "no_rope_layers": []}
LLAMA4 |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attn_temperature_tuning": True, "attn_scale": 0.1}
LLAMA4 |= {"floor_scale": 8192, "tie_word_embeddings": False}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "mistralai/Mixtral-8x7B-v0.1": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8}
        | {"num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
        46_702_792_704,
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": (
        {"model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28}
        | {"num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 103424, "moe_num_experts": 64}
        | {"moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536, "moe_layer_start_index": 1}
        | {"moe_layer_end_index": 27, "moe_layer_interval": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
        | {"max_position_embeddings": 131072, "use_bias": False, "tie_word_embeddings": True},
        21_825_437_888,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "num_experts": 60}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4}
        | {"norm_topk_prob": False, "decoder_sparse_step": 1, "sliding_window": 32768, "use_sliding_window": False}
        | {"max_window_layers": 21, "max_position_embeddings": 8192, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
        14_315_784_192,
    ),
    "Qwen/Qwen3-30B-A3B": (
        QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"moe_intermediate_size": 768, "max_window_layers": 48},
        30_532_122_624,
    ),
    "Qwen/Qwen3-235B-A22B": (
        QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"moe_intermediate_size": 1536, "max_window_layers": 94},
        235_093_634_560,
    ),
    "openai/gpt-oss-20b": (
        GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12},
        20_914_757_184,
    ),
    "openai/gpt-oss-120b": (
        GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 18},
        116_829_156_672,
    ),
    "allenai/OLMoE-1B-7B-0924": (
        {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64}
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None, "rope_theta": 10000.0}
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        6_919_161_856,
    ),
    "ibm-granite/granite-3.1-1b-a400m-base": (
        {"model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 49155, "num_local_experts": 32}
        | {"num_experts_per_tok": 8, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0}
        | {"residual_multiplier": 0.22, "logits_scaling": 6.0, "rope_theta": 1500000, "rope_scaling": None}
        | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        1_334_628_352,
    ),
    "zai-org/GLM-4.5": (
        GLM | {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "use_qk_norm": True}
        | {"num_hidden_layers": 92, "first_k_dense_replace": 3, "n_routed_experts": 160, "routed_scaling_factor": 2.5},
        358_337_791_296 - 5_539_962_272,  # without the multi-token prediction layer
    ),
    "zai-org/GLM-4.5-Air": (
        GLM | {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "use_qk_norm": False}
        | {"num_hidden_layers": 46, "first_k_dense_replace": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0},
        110_468_824_832 - 3_616_573_568,  # without the multi-token prediction layer
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        DEEPSEEK | {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944}
        | {"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None}
        | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "max_position_embeddings": 163840}
        | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        15_706_484_224,
    ),
    "deepseek-ai/DeepSeek-V3": (
        DEEPSEEK | {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "q_lora_rank": 1536}
        | {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256}
        | {"moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8}
        | {"topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840}
        | {"num_nextn_predict_layers": 1, "rope_scaling": YARN},
        671_026_419_200,
    ),
    "meta-llama/Llama-4-Scout-17B-16E": (
        {"model_type": "llama4", "vision_config": {"model_type": "llama4_vision_model"}, "boi_token_index": 200080}
        | {"text_config": LLAMA4 | {"num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True}
           | {"max_position_embeddings": 10485760}
           | {"rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
              | {"original_max_position_embeddings": 8192}}},
        108_641_793_536 - 871_932_416,  # without the vision encoder
    ),
    "meta-llama/Llama-4-Maverick-17B-128E": (
        {"model_type": "llama4", "vision_config": {"model_type": "llama4_vision_model"}, "boi_token_index": 200080}
        | {"text_config": LLAMA4 | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
           | {"max_position_embeddings": 1048576, "rope_scaling": None}},
        401_583_781_376 - 871_932_416,  # without the vision encoder
    ),
}  # fmt: skip
