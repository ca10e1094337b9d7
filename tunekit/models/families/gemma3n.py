"""Gemma 3n text model: several residual streams, per-layer embeddings, sparse activations, shared keys and values."""

from dataclasses import replace
from typing import Any

from tunekit.models.families.base import (
    FULL,
    SLIDING,
    Config,
    all_but_every_nth,
    attention_spec,
    decoder_spec,
    layer_types,
    mlp_spec,
    reject_config_values,
    rope_for_layer_type,
    text_model_table,
    with_default_config,
)
from tunekit.models.families.gemma4 import HUB, LAYER, kv_sources, unused_kv_table
from tunekit.models.families.gemma4 import TABLE as GEMMA4
from tunekit.models.spec import MLP, AltUp, DecoderSpec, Layer, Norm, PerLayerInput
from tunekit.models.weight_map import KeyRule

COEFFICIENTS = ("modality_router", "prediction_coefs", "correction_coefs")
TABLE = (
    KeyRule("split.projections.{}", "model.altup_projections.{}"),
    KeyRule("join.projections.{}", "model.altup_unembed_projections.{}"),
    *(KeyRule(f"{LAYER}.coefficients.{name}", f"{HUB}.altup.{name}.weight") for name in COEFFICIENTS),
    KeyRule(f"{LAYER}.coefficients", f"{HUB}.altup"),
    KeyRule(f"{LAYER}.laurel.norm", f"{HUB}.laurel.post_laurel_norm"),
    KeyRule(f"{LAYER}.laurel", f"{HUB}.laurel"),
    *GEMMA4,
)
VISION = text_model_table(TABLE, "vision_tower", "embed_vision", "audio_tower", "embed_audio")
DEFAULTS = {"hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35, "num_attention_heads": 8}
DEFAULTS |= {"num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262_400}
DEFAULTS |= {"max_position_embeddings": 32_768, "sliding_window": 512, "tie_word_embeddings": True}
DEFAULTS |= {"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 15}
DEFAULTS |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0, "laurel_rank": 64}
DEFAULTS |= {"altup_num_inputs": 4, "altup_coef_clip": 120.0, "altup_correct_scale": True}


def spec(config: Config) -> DecoderSpec:
    c = with_layer_types(config)
    reject_config_values(c, {"altup_active_idx": 0, "use_bidirectional_attention": False})
    norm = Norm(c["rms_norm_eps"], scale_in_fp32=True)
    fields: dict[str, Any] = {"qk_norm": norm, "v_norm": Norm(c["rms_norm_eps"], weight=False), "scale": 1.0}
    full = attention_spec(c, rope=rope_for_layer_type(c, FULL), **fields)
    local_rope = rope_for_layer_type(c, SLIDING, rope_theta=c["rope_local_base_freq"], rope_scaling=None)
    mixers = {FULL: full, SLIDING: replace(full, rope=local_rope, window=c["sliding_window"])}

    def layer(kind: str, source: int | None, ffn: MLP) -> Layer:
        return Layer(replace(mixers[kind], kv_shared_layer=source), ffn, post_norm=True)

    streams = c["altup_num_inputs"], c["laurel_rank"], c["altup_coef_clip"], bool(c["altup_correct_scale"])
    per_layer = c["vocab_size_per_layer_input"], c["hidden_size_per_layer_input"], feed_forward(c)[0].act
    return decoder_spec(
        c,
        map(layer, c["layer_types"], kv_sources(c), feed_forward(c)),
        norm=norm,
        embed_scale=c["hidden_size"] ** 0.5,
        logit_softcap=c["final_logit_softcapping"],
        per_layer=PerLayerInput(*per_layer, unknown_id=0),
        altup=AltUp(*streams),
    )


def with_layer_types(config: Config) -> dict[str, Any]:
    """config.json with `layer_types`, by default with full attention in every fifth layer."""
    c = with_default_config(config, **DEFAULTS)
    return c | {"hidden_act": c["hidden_activation"], "layer_types": layer_types(c, all_but_every_nth(5, c))}


def feed_forward(c: Config) -> list[MLP]:
    """Feed-forward layers, whose width and sparsity may be lists; by default, the first ten of many are sparse."""
    count, widths, sparsity = c["num_hidden_layers"], c["intermediate_size"], c.get("activation_sparsity_pattern")
    widths = widths if isinstance(widths, list) else [widths] * count
    if sparsity is None:
        sparsity = [0.95 if i < 10 < count else 0.0 for i in range(count)]
    for key, values in (("intermediate_size", widths), ("activation_sparsity_pattern", sparsity)):
        if len(values) != count:
            raise ValueError(f"{key} has {len(values)} entries, but num_hidden_layers is {count}")
    return [
        replace(mlp_spec({**c, "intermediate_size": width, "mlp_bias": False}), sparsity=share)
        for width, share in zip(widths, sparsity, strict=True)
    ]


def config_table(config: Config) -> tuple[KeyRule, ...]:
    """Files contain unused k and v weights of layers that reuse those of others."""
    return unused_kv_table(with_layer_types(config))
