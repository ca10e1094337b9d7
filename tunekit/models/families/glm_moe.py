"""GLM-4.5 and GLM-4.6: grouped-query attention with the MoE of DeepSeek V3."""

from tunekit.models.families.base import LLAMA, Config, attention_spec, decoder_spec, mlp_spec, with_default_config
from tunekit.models.families.deepseek import SHARED, sigmoid_moe
from tunekit.models.families.moe import EXPERTS, ROUTER
from tunekit.models.spec import DecoderSpec, Layer, Norm

TABLE = (*EXPERTS, *SHARED, *ROUTER, *LLAMA)
DEFAULTS = {"first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
DEFAULTS |= {"n_group": 1, "topk_group": 1}
DEFAULTS |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
DEFAULTS |= {"partial_rotary_factor": 0.5, "use_qk_norm": False}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    norm = Norm(c["rms_norm_eps"]) if c["use_qk_norm"] else None
    mixer, moe = attention_spec(c, qk_norm=norm, out_bias=False), sigmoid_moe(c)
    dense = c["first_k_dense_replace"]
    return decoder_spec(c, (Layer(mixer, mlp_spec(c) if i < dense else moe) for i in range(c["num_hidden_layers"])))
