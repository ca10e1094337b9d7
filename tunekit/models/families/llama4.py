"""Llama 4, the text part: chunked layers with rotation, full ones without, experts in every n-th layer."""

from dataclasses import replace

from tunekit.models.families.base import (
    FAR,
    LLAMA,
    Config,
    attention,
    beside,
    complete,
    decoder,
    kinds,
    mlp,
    rope,
    text,
    turned,
)
from tunekit.models.families.moe import OURS, sparse, stacked
from tunekit.models.spec import DecoderSpec, Layer, Norm, QueryTuning
from tunekit.models.weights import Row, under

CHUNKED = "chunked_attention"
FFN = "model.layers.{}.feed_forward"
TABLE = (
    *stacked(f"{OURS}.experts", f"{FFN}.experts", transposed=True),
    Row(f"{OURS}.shared", f"{FFN}.shared_expert"),
    Row(OURS, FFN),
    *LLAMA,
)
VISION = beside(TABLE, "vision_model", "multi_modal_projector")
LIVE = (Row("head", "language_model.lm_head"), *under("language_model.model.", TABLE))
USUAL = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
USUAL |= {"max_position_embeddings": 131_072, "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1}
USUAL |= {"use_qk_norm": True, "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192}
USUAL |= {"attention_chunk_size": 8192, "num_experts_per_tok": 1}


def spec(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    count, step = c["num_hidden_layers"], c["interleave_moe_layer_step"]
    turns = turned(c)
    sees = kinds(c, [CHUNKED if turn else FAR for turn in turns], CHUNKED)
    at = c["moe_layers"] if "moe_layers" in c else range(step - 1, count, step)

    norm = Norm(c["rms_norm_eps"], weight=False) if c["use_qk_norm"] else None
    near = attention(c, rope=replace(rope(c), paired=True), norm_after_rope=True, qk_norm=norm)
    tuning = QueryTuning(c["attn_scale"], c["floor_scale"], shift=1.0) if c["attn_temperature_tuning"] else None
    far = replace(near, rope=None, qk_norm=None, tuning=tuning)

    hidden = c["intermediate_size"]
    dense = mlp(c | {"intermediate_size": c["intermediate_size_mlp"]})
    moe = sparse(c, hidden, score="top_sigmoid", normalize=False, weigh_input=True, shared=hidden)
    chunks = {CHUNKED: c["attention_chunk_size"]}
    return decoder(
        c,
        (
            Layer(replace(near if turns[i] else far, chunk=chunks.get(sees[i])), moe if i in at else dense)
            for i in range(count)
        ),
    )


def vision(config: Config) -> DecoderSpec:
    return spec(text(config, "llama4_text"))
