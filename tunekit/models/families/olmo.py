"""OLMo 2 and 3: norms behind the parts and not before them, and over all heads of q and k together."""

from dataclasses import replace

from tunekit.models.families.base import FAR, LLAMA, NEAR, Config, attention, complete, decoder, in_turns, mlp, rope_of
from tunekit.models.spec import Attention, DecoderSpec, Layer, Norm
from tunekit.models.weights import Row

TABLE = (
    Row("layers.{}.attn_post_norm", "model.layers.{}.post_attention_layernorm"),
    Row("layers.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm"),
    *LLAMA,
)
USUAL = {"rms_norm_eps": 1e-5}
USUAL3 = USUAL | {"rope_theta": 5e5, "sliding_window": 4096}


def olmo2(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    return spec(c, [attention(c)] * c["num_hidden_layers"])


def olmo3(config: Config) -> DecoderSpec:
    """Windows in three of four layers; long rows are for the fourth alone."""
    c = complete(config, **USUAL3)
    far = attention(c, rope=rope_of(c, FAR))
    near = replace(far, rope=rope_of(c, NEAR, rope_scaling=None), window=c["sliding_window"])
    return spec(c, in_turns(c, 4, near, far))


def spec(c: Config, mixers: list[Attention]) -> DecoderSpec:
    norm = Norm(c["rms_norm_eps"], late=True)
    across = replace(norm, across_heads=True)
    layers = (Layer(replace(mixer, qk_norm=across), mlp(c), pre_norm=False, post_norm=True) for mixer in mixers)
    return decoder(c, layers, norm=norm)
