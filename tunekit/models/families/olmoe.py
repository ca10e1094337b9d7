"""OLMoE: experts in all layers, QK norms over all heads."""

from tunekit.models.families.base import (
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    reject_config_values,
    with_default_config,
)
from tunekit.models.families.moe import EXPERTS, ROUTER, moe_spec
from tunekit.models.spec import DecoderSpec, Layer, Norm

TABLE = (*EXPERTS, *ROUTER, *LLAMA)
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "norm_topk_prob": False, "num_experts_per_tok": 8}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    reject_config_values(c, {"clip_qkv": None})
    mixer = attention_spec(c, qk_norm=Norm(c["rms_norm_eps"], over_all_heads=True))
    moe = moe_spec(c, c["intermediate_size"], norm_topk_prob=c["norm_topk_prob"])
    return decoder_spec(c, [Layer(mixer, moe)] * c["num_hidden_layers"])
