"""Llama 4 text model: chunked layers with RoPE, full layers without, experts in every n-th layer."""

from dataclasses import replace

from tunekit.models.families.base import (
    FULL,
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    layer_types,
    layers_with_rope,
    mlp_spec,
    rope_from_config,
    text_model_table,
    with_default_config,
)
from tunekit.models.families.moe_base import OURS, moe_spec, stacked_expert_table
from tunekit.models.spec import AttnTemperatureTuning, DecoderSpec, Layer, Norm
from tunekit.models.weight_map import KeyRule, with_prefix

CHUNKED = "chunked_attention"
FFN = "model.layers.{}.feed_forward"
TABLE = (
    *stacked_expert_table(f"{OURS}.experts", f"{FFN}.experts", transposed=True),
    KeyRule(f"{OURS}.shared", f"{FFN}.shared_expert"),
    KeyRule(OURS, FFN),
    *LLAMA,
)
VISION = text_model_table(TABLE, "vision_model", "multi_modal_projector")
LIVE = (KeyRule("head", "language_model.lm_head"), *with_prefix("language_model.model.", TABLE))
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
DEFAULTS |= {"max_position_embeddings": 131_072, "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1}
DEFAULTS |= {"use_qk_norm": True, "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192}
DEFAULTS |= {"attention_chunk_size": 8192, "num_experts_per_tok": 1}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    count, step = c["num_hidden_layers"], c["interleave_moe_layer_step"]
    has_rope = layers_with_rope(c)
    types = layer_types(c, [CHUNKED if rotates else FULL for rotates in has_rope], CHUNKED)
    moe_layers = c["moe_layers"] if "moe_layers" in c else range(step - 1, count, step)

    norm = Norm(c["rms_norm_eps"], weight=False) if c["use_qk_norm"] else None
    chunked = attention_spec(c, rope=replace(rope_from_config(c), interleaved=True), norm_after_rope=True, qk_norm=norm)
    tuning = AttnTemperatureTuning(c["attn_scale"], c["floor_scale"], shift=1.0)
    tuning = tuning if c["attn_temperature_tuning"] else None
    full = replace(chunked, rope=None, qk_norm=None, temperature_tuning=tuning)

    hidden = c["intermediate_size"]
    dense = mlp_spec(c | {"intermediate_size": c["intermediate_size_mlp"]})
    experts = {"scoring_func": "top_sigmoid", "norm_topk_prob": False, "apply_router_weight_on_input": True}
    moe = moe_spec(c, hidden, shared_intermediate_size=hidden, router_aux_loss_coef=0.0, **experts)

    def layer(i: int) -> Layer:
        chunk = c["attention_chunk_size"] if types[i] == CHUNKED else None
        return Layer(replace(chunked if has_rope[i] else full, chunk=chunk), moe if i in moe_layers else dense)

    return decoder_spec(c, map(layer, range(count)))
