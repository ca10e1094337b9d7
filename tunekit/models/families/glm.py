"""GLM-4: rotation of channel pairs in half of each head; its later version has norms on both sides."""

from dataclasses import replace

from tunekit.models.families.base import FUSED_MLP, LLAMA, Config, attention, complete, decoder, mlp, rope
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weights import Row

TABLE = (FUSED_MLP, *LLAMA)
TABLE4 = (
    Row("layers.{}.attn_post_norm", "model.layers.{}.post_self_attn_layernorm"),
    Row("layers.{}.mlp_post_norm", "model.layers.{}.post_mlp_layernorm"),
    *TABLE,
)
USUAL = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7}
USUAL |= {"attention_bias": True, "partial_rotary_factor": 0.5}


def glm(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    mixer = attention(c, rope=replace(rope(c), paired=True), out_bias=False)
    return decoder(c, [Layer(mixer, mlp(c))] * c["num_hidden_layers"])


def glm4(config: Config) -> DecoderSpec:
    """As `glm`, and what leaves a part goes through a norm."""
    spec = glm(config)
    return replace(spec, layers=tuple(replace(layer, post_norm=True) for layer in spec.layers))
