"""Phi-3, Phi-3.5, Phi-4: Llama with fused projections, and LongRoPE for long rows."""

from tunekit.models.families.base import FUSED_MLP, LLAMA, Config, attention, complete, decoder, mlp, turning
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weights import Fused, Row

TABLE = (
    Row(tuple(f"layers.{{}}.attn.{part}_proj" for part in "qkv"), "model.layers.{}.self_attn.qkv_proj", Fused()),
    FUSED_MLP,
    *LLAMA,
)
USUAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
OLD = {"su", "yarn"}  # what the first files call longrope


def spec(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    p = turning(c)
    kind = p.get("rope_type") or p.get("type")
    p = p | {"rope_type": "longrope" if kind in OLD else kind}
    mixer = attention(c | {"rope_scaling": p}, bias=False, out_bias=False, window=c.get("sliding_window"))
    return decoder(c, [Layer(mixer, mlp(c))] * c["num_hidden_layers"])
