"""Phi-3, Phi-3.5, Phi-4: Llama with fused projections, and LongRoPE."""

from tunekit.models.families.base import (
    FUSED_MLP,
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    mlp_spec,
    rope_scaling_config,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weight_map import Fused, KeyRule

TABLE = (
    KeyRule(tuple(f"layers.{{}}.attn.{part}_proj" for part in "qkv"), "model.layers.{}.self_attn.qkv_proj", Fused()),
    FUSED_MLP,
    *LLAMA,
)
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
DEFAULTS |= {"partial_rotary_factor": 1.0}
LONGROPE_ALIASES = {"su", "yarn"}  # names of longrope in the first files


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    p = rope_scaling_config(c)
    kind = p.get("rope_type") or p.get("type")
    p = p | {"rope_type": "longrope" if kind in LONGROPE_ALIASES else kind}
    mixer = attention_spec(c | {"rope_scaling": p}, bias=False, out_bias=False, window=c.get("sliding_window"))
    return decoder_spec(c, [Layer(mixer, mlp_spec(c))] * c["num_hidden_layers"])
