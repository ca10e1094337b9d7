"""Shapes of small dense models."""

from typing import Any

BASE = {"vocab_size": 67, "intermediate_size": 52, "num_hidden_layers": 3, "max_position_embeddings": 64}
BASE |= {"initializer_range": 0.03, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
HEADS = BASE | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA = HEADS | {"model_type": "llama"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
MISTRAL = HEADS | {"model_type": "mistral"}
MINISTRAL3 = HEADS | {"model_type": "ministral3", "head_dim": 12}
TUNED = YARN | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.3, "beta_fast": 8.0, "beta_slow": 2.0}
SMOLLM3 = HEADS | {"model_type": "smollm3", "num_hidden_layers": 4}
GRANITE = HEADS | {"model_type": "granite", "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
GRANITE |= {"residual_multiplier": 0.6, "logits_scaling": 1.7}
GEMMA = HEADS | {"head_dim": 10, "pad_token_id": 0}
GEMMA2 = GEMMA | {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 20}
GEMMA2 |= {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 15.0}
GEMMA3 = GEMMA | {"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 20}
GEMMA3_ROPE = {"full_attention": LINEAR | {"rope_theta": 1e6}}
GEMMA3_ROPE |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
COHERE = HEADS | {"logit_scale": 0.7, "pad_token_id": 0}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
PHI = HEADS | {"model_type": "phi3", "pad_token_id": 0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6]}
LONG |= {"long_factor": [1.5, 2.0, 4.0, 7.0], "original_max_position_embeddings": 16}
GLM = HEADS | {"model_type": "glm4", "head_dim": 12, "pad_token_id": 0}
OLMO2 = HEADS | {"model_type": "olmo2"}
OLMO3 = HEADS | {"model_type": "olmo3", "sliding_window": 5, "num_hidden_layers": 5}
FULL3 = YARN | {"rope_theta": 5e5, "attention_factor": 1.2}
QWEN2 = BASE | {"model_type": "qwen2", "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1}
QWEN3 = BASE | {"model_type": "qwen3", "hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2}
QWEN3 |= {"head_dim": 12}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
VIT = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"image_size": 8, "patch_size": 4}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
MLLAMA_VISION = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "attention_heads": 2}
MLLAMA_VISION |= {"num_global_layers": 1, "image_size": 8, "patch_size": 4, "intermediate_layers_indices": [0]}
MLLAMA_VISION |= {"vision_output_dim": 32, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 1]}


def wrap_in_multimodal(shape: dict[str, Any]) -> dict[str, Any]:
    """Config of a multimodal model with this text model."""
    return {"text_config": shape, "tie_word_embeddings": shape.get("tie_word_embeddings", False)}


DENSE: dict[str, dict[str, Any]] = {
    "llama2": LLAMA | {"num_key_value_heads": 6, "rms_norm_eps": 1e-5},
    "llama3.1": LLAMA | {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5},
    "llama3.2": LLAMA | {"rope_parameters": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "num_key_value_heads": 1},
    "llama-linear": LLAMA | {"rope_parameters": LINEAR},
    "llama-yarn": LLAMA | {"rope_parameters": YARN},
    "llama-yarn-mscale": LLAMA
    | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}},
    "llama-yarn-smooth": LLAMA | {"rope_parameters": YARN | {"attention_factor": 0.8, "truncate": False}},
    "llama-gelu": LLAMA | {"hidden_act": "gelu_pytorch_tanh"},
    "smollm2": BASE
    | {"model_type": "llama", "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True},
    "smollm3": SMOLLM3,
    "smollm3-sliding": SMOLLM3
    | {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2, "attention_bias": True}
    | {"tie_word_embeddings": False},
    "granite": GRANITE,
    "granite-tied": GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": MISTRAL | {"sliding_window": 5},
    "mistral-null": MISTRAL | {"sliding_window": None, "head_dim": 12},
    "ministral": MISTRAL
    | {"model_type": "ministral", "sliding_window": 5, "head_dim": 12}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ministral3": MINISTRAL3 | {"rope_parameters": TUNED | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "ministral3-sliding": MINISTRAL3 | {"rope_parameters": TUNED, "sliding_window": 5, "tie_word_embeddings": True},
    "gemma": GEMMA | {"model_type": "gemma", "num_key_value_heads": 1},
    "gemma-gelu": GEMMA | {"model_type": "gemma", "hidden_act": "gelu", "attention_bias": True},
    "gemma2": GEMMA2,
    "gemma2-uncapped": GEMMA2
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_hidden_layers": 4},
    "gemma3": GEMMA3 | {"num_hidden_layers": 7},
    "gemma3-scaled": GEMMA3
    | {"rope_parameters": GEMMA3_ROPE, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    | {"tie_word_embeddings": False, "final_logit_softcapping": 15.0},
    "phi3": PHI | {"sliding_window": 7, "tie_word_embeddings": True},
    "phi3-long": PHI | {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    "phi4-mini": PHI
    | {"hidden_size": 96, "original_max_position_embeddings": 12}
    | {"rope_parameters": LONG | {"partial_rotary_factor": 0.5, "attention_factor": 1.1}},
    "seed-oss": HEADS | {"model_type": "seed_oss", "head_dim": 12},
    "seed-oss-biases": HEADS
    | {"model_type": "seed_oss", "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "cohere": COHERE | {"model_type": "cohere"},
    "cohere-biases": COHERE | {"model_type": "cohere", "attention_bias": True, "tie_word_embeddings": False},
    "cohere2": COHERE | {"model_type": "cohere2", "sliding_window": 5, "num_hidden_layers": 5},
    "ernie4.5": HEADS | {"model_type": "ernie4_5", "head_dim": 12},
    "ernie4.5-biases": HEADS | {"model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": False},
    "hunyuan": HEADS | {"model_type": "hunyuan_v1_dense", "head_dim": 12, "rope_parameters": STRETCHED},
    "hunyuan-biases": HEADS
    | {"model_type": "hunyuan_v1_dense", "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    "glm": GLM | {"model_type": "glm"},
    "glm4": GLM | {"attention_bias": False, "tie_word_embeddings": True},
    "glm4-whole": GLM | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "olmo2": OLMO2,
    "olmo2-biases": OLMO2 | {"attention_bias": True, "tie_word_embeddings": True},
    "olmo3": OLMO3,
    "olmo3-yarn": OLMO3
    | {"rope_parameters": {"full_attention": FULL3, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    "qwen2": QWEN2 | {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2-tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen2-sliding": QWEN2 | SLIDING,
    "qwen3": QWEN3 | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3-biases": QWEN3 | {"attention_bias": True, "num_key_value_heads": 1},
    "qwen3-sliding": QWEN3 | SLIDING,
    "gemma3-vision": {"model_type": "gemma3", "vision_config": VIT, "mm_tokens_per_image": 4}
    | wrap_in_multimodal(GEMMA3 | {"num_hidden_layers": 7, "tie_word_embeddings": True}),
    "llama3.2-vision": {"model_type": "mllama", "vision_config": MLLAMA_VISION}
    | wrap_in_multimodal(
        HEADS | {"model_type": "mllama_text_model", "rope_parameters": LLAMA3, "cross_attention_layers": [1]}
    ),
    "mistral3-vision": {"model_type": "mistral3", "vision_config": VIT | {"model_type": "pixtral", "head_dim": 8}}
    | wrap_in_multimodal(MISTRAL | {"sliding_window": None, "head_dim": 12}),
    "ministral3-vision": {"model_type": "mistral3", "vision_config": VIT | {"model_type": "pixtral", "head_dim": 8}}
    | wrap_in_multimodal(MINISTRAL3 | {"rope_parameters": TUNED, "tie_word_embeddings": True}),
    "qwen2-vl": {"model_type": "qwen2_vl", "vision_config": VISION | {"embed_dim": 16, "hidden_size": 60}}
    | wrap_in_multimodal(
        QWEN2 | {"model_type": "qwen2_vl_text", "rope_parameters": MROPE, "tie_word_embeddings": True}
    ),
    "qwen2.5-vl": {"model_type": "qwen2_5_vl", "vision_config": VISION | {"out_hidden_size": 60}}
    | wrap_in_multimodal(QWEN2 | SLIDING | {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE}),
    "qwen3-vl": {"model_type": "qwen3_vl"}
    | {
        "vision_config": VISION
        | {"out_hidden_size": 40, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    }
    | wrap_in_multimodal(QWEN3 | {"model_type": "qwen3_vl_text", "rope_parameters": MROPE}),
}
