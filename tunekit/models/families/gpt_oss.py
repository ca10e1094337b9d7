"""gpt-oss: alternating sliding and full attention, attention sinks, experts with biases."""

from dataclasses import replace

from tunekit.models.families.base import (
    LLAMA,
    Config,
    alternate_layers,
    attention_spec,
    decoder_spec,
    rope_scaling_config,
    with_default_config,
)
from tunekit.models.families.moe_base import HUB, OURS, moe_spec, stacked_expert_table
from tunekit.models.spec import DecoderSpec, Layer, Norm
from tunekit.models.weight_map import Fused, KeyRule

EXPERTS = f"{OURS}.experts", f"{HUB}.experts"
TABLE = (
    *stacked_expert_table(*EXPERTS, transposed=True, interleaved=True),
    KeyRule(
        (f"{EXPERTS[0]}.gate_proj.bias", f"{EXPERTS[0]}.up_proj.bias"),
        f"{EXPERTS[1]}.gate_up_proj_bias",
        Fused(dim=1, interleaved=True),
    ),
    KeyRule(f"{EXPERTS[0]}.down_proj.bias", f"{EXPERTS[1]}.down_proj_bias"),
    *LLAMA,
)
SWIGLU = (7.0, 1.702)  # limit and alpha of all published models
ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
ROPE |= {"original_max_position_embeddings": 4096}
DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
DEFAULTS |= {"swiglu_limit": SWIGLU[0], "swiglu_alpha": SWIGLU[1]}
DEFAULTS |= {"attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "max_position_embeddings": 131_072}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    c["rope_scaling"] = rope_scaling_config(config) or ROPE
    swiglu = c["swiglu_limit"], c["swiglu_alpha"]
    experts = {"act": "clamped_swiglu", "swiglu": None if swiglu == SWIGLU else swiglu}
    experts |= {"scoring_func": "top_softmax", "norm_topk_prob": False, "router_bias": True, "bias": True}
    moe = moe_spec(c, c["intermediate_size"], **experts)
    full = attention_spec(c, sinks=True)
    mixers = alternate_layers(c, 2, replace(full, window=c["sliding_window"]), full)
    return decoder_spec(c, [Layer(mixer, moe) for mixer in mixers], norm=Norm(c["rms_norm_eps"], scale_in_fp32=True))
