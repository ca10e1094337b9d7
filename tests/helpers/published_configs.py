"""config.json of published checkpoints, reduced to the keys that describe the model, with their parameter counts.

Most published models are presets; these have features that no preset has.
"""

from typing import Any

from tests.helpers import published_moe_configs

FACTORS = {"type": "longrope", "short_factor": [1.0 + i / 50 for i in range(48)]}
FACTORS |= {"long_factor": [1.0 + i for i in range(48)]}  # real length, made-up values
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304}
SIGLIP |= {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
PIXTRAL |= {"num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14, "rope_theta": 10000.0}

DELTA = {"full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
DELTA |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "hidden_act": "silu"}
DELTA |= {"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False}
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
QWEN3_5 = DELTA | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "attn_output_gate": True}
QWEN3_5 |= {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
QWEN3_5 |= {"rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
            | {"rope_theta": 10000000, "partial_rotary_factor": 0.25}}  # fmt: skip
VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}
MAMBA = {"mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA |= {"mamba_conv_bias": True, "mamba_proj_bias": False}
NEMOTRON = {"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "mlp_hidden_act": "relu2"}
NEMOTRON |= {"use_conv_bias": True, "use_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
NEMOTRON |= {"time_step_limit": [0.0, float("inf")]}


def config(model_type: str, sizes: tuple[int, int, int, int, int | None, int], **options: Any) -> dict[str, Any]:
    """Hidden size, intermediate size, layers, heads, key-value heads, vocabulary size."""
    keys = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    return {"model_type": model_type} | dict(zip((*keys, "vocab_size"), sizes, strict=True)) | options


# With parameter counts; for multimodal models, of the text model.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "mistralai/Mistral-7B-v0.1": (
        config("mistral", (4096, 14336, 32, 32, 8, 32000), rms_norm_eps=1e-5, max_position_embeddings=32768)
        | {"sliding_window": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False},
        7_241_732_096,
    ),
    "mistralai/Mistral-Small-3.1-24B-Base-2503": (
        {"model_type": "mistral3", "vision_config": PIXTRAL, "spatial_merge_size": 2, "vision_feature_layer": -1}
        | {"text_config": config("mistral", (5120, 32768, 40, 32, 8, 131072), head_dim=128, sliding_window=None)
           | {"rms_norm_eps": 1e-5, "rope_theta": 1000000000.0, "max_position_embeddings": 131072}},
        23_572_403_200,
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        config("qwen2_5_vl", (3584, 18944, 28, 28, 4, 152064), rms_norm_eps=1e-6, max_position_embeddings=128000)
        | {"tie_word_embeddings": False, "rope_theta": 1000000.0, "sliding_window": 32768, "max_window_layers": 28}
        | {"use_sliding_window": False, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
        | {"vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420}},
        7_615_616_512,
    ),
    "Qwen/Qwen3-VL-4B-Instruct": (
        {"model_type": "qwen3_vl", "tie_word_embeddings": True}
        | {"text_config": config("qwen3_vl_text", (2560, 9728, 36, 32, 8, 151936), head_dim=128, rope_theta=5000000)
           | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
           | {"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}}
        | {"vision_config": {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "out_hidden_size": 2560}},
        4_022_468_096,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        config("qwen3_next", (2048, 5120, 48, 16, 2, 151936), tie_word_embeddings=False, rope_theta=10000000)
        | DELTA | EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1}
        | {"mlp_only_layers": [], "norm_topk_prob": True, "partial_rotary_factor": 0.25, "rope_scaling": None},
        79_674_391_296,
    ),
    "Qwen/Qwen3.5-27B": (
        {"model_type": "qwen3_5", "tie_word_embeddings": False, "vision_config": VISION | {"out_hidden_size": 5120}}
        | {"text_config": config("qwen3_5_text", (5120, 17408, 64, 24, 4, 248320))
           | QWEN3_5 | {"linear_num_value_heads": 48, "tie_word_embeddings": False}},
        26_895_998_464,
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": VISION | {"out_hidden_size": 2048}}
        | {"text_config": {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40}
           | {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 248320, "num_experts": 256}
           | QWEN3_5 | EXPERTS | {"num_experts_per_tok": 8, "layer_types": QWEN3_5["layer_types"][:40]}},
        34_660_610_688,
    ),
    "google/gemma-2b": (
        config("gemma", (2048, 16384, 18, 8, 1, 256000), head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=8192)
        | {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0, "rope_scaling": None},
        2_506_172_416,
    ),
    "google/gemma-3-4b-it": (
        {"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 256}
        | {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
           | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}},
        3_880_263_168,
    ),
    "google/gemma-3-27b-it": (
        {"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 256}
        | {"text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504}
           | {"num_hidden_layers": 62, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
           | {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168}},
        27_009_346_304,
    ),
    "microsoft/Phi-3.5-mini-instruct": (
        config("phi3", (3072, 8192, 32, 32, 32, 32064), rms_norm_eps=1e-5, max_position_embeddings=131072)
        | {"original_max_position_embeddings": 4096, "rope_scaling": FACTORS, "rope_theta": 10000.0}
        | {"sliding_window": 262144, "attention_bias": False, "tie_word_embeddings": False},
        3_821_079_552,
    ),
    "microsoft/Phi-4-mini-instruct": (
        config("phi3", (3072, 8192, 32, 24, 8, 200064), rms_norm_eps=1e-5, max_position_embeddings=131072)
        | {"original_max_position_embeddings": 4096, "rope_scaling": FACTORS, "rope_theta": 10000.0}
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "lm_head_bias": False},
        3_836_021_760,
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        config("seed_oss", (5120, 27648, 64, 80, 8, 155136), head_dim=128, attention_bias=True, rms_norm_eps=1e-6)
        | {"attention_out_bias": False, "rope_theta": 10000000.0, "max_position_embeddings": 524288}
        | {"tie_word_embeddings": False},
        36_151_104_512,
    ),
    "CohereLabs/c4ai-command-r-v01": (
        config("cohere", (8192, 22528, 40, 64, 64, 256000), layer_norm_eps=1e-5, logit_scale=0.0625)
        | {"max_position_embeddings": 8192, "rope_theta": 8000000.0, "use_qk_norm": False},
        34_980_831_232,
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": (
        config("cohere2", (4096, 14336, 32, 32, 8, 256000), layer_norm_eps=1e-5, logit_scale=0.25)
        | {"max_position_embeddings": 8192, "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4},
        8_028_033_024,
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (
        config("ernie4_5", (1024, 3072, 18, 16, 2, 103424), head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0)
        | {"max_position_embeddings": 131072, "use_bias": False, "tie_word_embeddings": True},
        360_748_032,
    ),
    "tencent/Hunyuan-7B-Instruct": (
        config("hunyuan_v1_dense", (4096, 14336, 32, 32, 8, 128167), head_dim=128, rms_norm_eps=1e-5)
        | {"rope_theta": 10000.0, "max_position_embeddings": 32768, "tie_word_embeddings": True}
        | {"rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
           | {"mscale_all_dim": 1.0, "type": "dynamic"}},
        7_504_568_320,
    ),
    "LiquidAI/LFM2-1.2B": (
        config("lfm2", (2048, 12288, 16, 32, 8, 65536), norm_eps=1e-5, rope_theta=1000000.0, conv_L_cache=3)
        | {"block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "conv_bias": False}
        | {"block_ffn_dim_multiplier": 1.0, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000},
        1_170_340_608,
    ),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": (
        {"model_type": "mllama"}
        | {"text_config": config("mllama_text_model", (4096, 14336, 40, 32, 8, 128256), rms_norm_eps=1e-5)
           | {"rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False}
           | {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}},
        8_030_294_016,
    ),
    "ibm-ai-platform/Bamba-9B-v1": (
        config("bamba", (4096, 14336, 32, 32, 8, 128256), rms_norm_eps=1e-5, rope_theta=10000.0) | MAMBA
        | {"attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "max_position_embeddings": 262144},
        9_780_235_392,
    ),
    "ibm-granite/granite-4.0-h-tiny": (
        config("granitemoehybrid", (1536, 512, 40, 12, 4, 100352), rms_norm_eps=1e-5, rope_theta=10000) | MAMBA
        | {"layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)], "mamba_n_heads": 48}
        | {"num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024}
        | {"position_embedding_type": "nope", "embedding_multiplier": 12, "attention_multiplier": 0.0078125}
        | {"residual_multiplier": 0.22, "logits_scaling": 6, "tie_word_embeddings": True},
        6_939_037_248,
    ),
    "ibm-granite/granite-4.0-micro": (
        config("granitemoehybrid", (2560, 8192, 40, 40, 8, 100352), rms_norm_eps=1e-5, rope_theta=10000000)
        | {"layer_types": ["attention"] * 40, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_d_head": "auto"}
        | {"shared_intermediate_size": 8192, "position_embedding_type": "rope", "embedding_multiplier": 12}
        | {"attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 10}
        | {"max_position_embeddings": 131072, "tie_word_embeddings": True},
        3_402_836_480,
    ),
    "tiiuae/Falcon-H1-0.5B-Instruct": (
        config("falcon_h1", (1024, 2048, 36, 8, 2, 32784), head_dim=64, rms_norm_eps=1e-5, rope_theta=1e11) | MAMBA
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_rms_norm": False, "mamba_norm_before_gate": False}
        | {"max_position_embeddings": 16384, "tie_word_embeddings": False, "mlp_multipliers": [0.88, 0.29]}
        | {"ssm_multipliers": [0.3, 0.25, 0.3, 0.5, 0.3]},  # real length, made-up values
        521_411_104,
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        config("nemotron_h", (2688, 1856, 52, 32, 2, 131072), head_dim=128, layer_norm_epsilon=1e-5) | NEMOTRON
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64}
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_group": 1}
        | {"moe_shared_expert_intermediate_size": 3712, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"norm_topk_prob": True, "max_position_embeddings": 262144},
        31_577_940_288,
    ),
    "nvidia/Nemotron-H-8B-Base-8K": (
        config("nemotron_h", (4096, 21504, 52, 32, 8, 131072), head_dim=128, layer_norm_epsilon=1e-5) | NEMOTRON
        | {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "mamba_num_heads": 128}
        | {"max_position_embeddings": 8192},
        8_100_852_736,
    ),
    "zai-org/glm-4-9b-chat-hf": (
        config("glm", (4096, 13696, 40, 32, 2, 151552), rms_norm_eps=1.5625e-07, max_position_embeddings=131072)
        | {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        9_399_951_360,
    ),
} | published_moe_configs.PUBLISHED  # fmt: skip
