"""gpt-oss: sliding and full attention in turns, a sink in every head, experts with biases."""

from dataclasses import replace

from tunekit.models.families.base import LLAMA, Config, attention, complete, decoder, in_turns, refuse, turning
from tunekit.models.families.moe import HUB, OURS, sparse, stacked
from tunekit.models.spec import DecoderSpec, Layer, Norm
from tunekit.models.weights import Fused, Row

EXPERTS = f"{OURS}.experts", f"{HUB}.experts"
TABLE = (
    *stacked(*EXPERTS, transposed=True, interleaved=True),
    Row(
        (f"{EXPERTS[0]}.gate_proj.bias", f"{EXPERTS[0]}.up_proj.bias"),
        f"{EXPERTS[1]}.gate_up_proj_bias",
        Fused(dim=1, interleaved=True),
    ),
    Row(f"{EXPERTS[0]}.down_proj.bias", f"{EXPERTS[1]}.down_proj_bias"),
    *LLAMA,
)
SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
ROPE |= {"original_max_position_embeddings": 4096}
USUAL = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
USUAL |= {"attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "max_position_embeddings": 131_072}


def spec(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    c["rope_scaling"] = turning(config) or ROPE
    refuse(c, SWIGLU)
    experts = {"act": "clamped_swiglu", "score": "top_softmax", "normalize": False, "router_bias": True, "bias": True}
    moe = sparse(c, c["intermediate_size"], **experts)
    far = attention(c, sinks=True)
    mixers = in_turns(c, 2, replace(far, window=c["sliding_window"]), far)
    return decoder(c, [Layer(mixer, moe) for mixer in mixers], norm=Norm(c["rms_norm_eps"], late=True))
