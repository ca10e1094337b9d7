"""HunYuan, dense: Llama with QK norms after RoPE, whose base may be stretched by a constant."""

from tunekit.models.families.base import (
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    head_dim,
    mlp_spec,
    rope_scaling_config,
    with_default_config,
)
from tunekit.models.spec import DecoderSpec, Layer, Norm
from tunekit.models.weight_map import KeyRule

TABLE = (
    KeyRule("layers.{}.attn.q_norm", "model.layers.{}.self_attn.query_layernorm"),
    KeyRule("layers.{}.attn.k_norm", "model.layers.{}.self_attn.key_layernorm"),
    *LLAMA,
)
DEFAULTS = {"rms_norm_eps": 1e-5}


def dense(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    p = {"rope_theta": c["rope_theta"]} | rope_scaling_config(c)
    if (p.get("rope_type") or p.get("type")) == "dynamic" and p.get("alpha"):
        # Published files name it dynamic, but frequencies do not depend on the length.
        dims = head_dim(c)
        theta = p["rope_theta"] * p["alpha"] ** (dims / (dims - 2))
        c |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    mixer = attention_spec(c, qk_norm=Norm(c["rms_norm_eps"]), norm_after_rope=True)
    return decoder_spec(c, [Layer(mixer, mlp_spec(c | {"mlp_bias": False}))] * c["num_hidden_layers"])
