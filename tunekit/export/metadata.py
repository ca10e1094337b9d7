"""Converts a model spec to the fields of a GGUF file."""

import math
from typing import Any

from gguf import Keys, RopeScalingType

from tunekit.export.architecture import Architecture
from tunekit.models.spec import (
    MLP,
    Attention,
    DecoderSpec,
    FeedForward,
    Layer,
    LinearScaling,
    LongRopeScaling,
    MoE,
    Rope,
    YarnScaling,
)

LLM, ATTENTION, ROPE = Keys.LLM, Keys.Attention, Keys.Rope


def model_fields(spec: DecoderSpec, arch: Architecture) -> dict[str, Any]:
    """Fields of a model. Properties without a field are omitted; `check_spec_matches` then reports a difference."""
    layers = [attention_fields(layer) for layer in spec.layers]
    global_layers = [attention for attention in layers if attention.window is None and attention.rope is not None]
    last_global = (global_layers or layers)[-1]
    fields = {
        LLM.VOCAB_SIZE: spec.vocab,
        LLM.CONTEXT_LENGTH: spec.context,
        LLM.EMBEDDING_LENGTH: spec.dim,
        LLM.BLOCK_COUNT: len(layers),
        ATTENTION.HEAD_COUNT: last_global.heads,
        ATTENTION.HEAD_COUNT_KV: last_global.kv_heads,
        ATTENTION.KEY_LENGTH: last_global.head_dim,
        ATTENTION.VALUE_LENGTH: last_global.head_dim,
        ATTENTION.LAYERNORM_RMS_EPS: float(spec.norm.eps),
    }
    ffn = spec.layers[-1].ffn
    assert ffn is not None, "the architectures have no layers without one"
    fields |= ffn_fields(ffn) | window_fields(layers, arch) | scale_fields(spec, last_global, arch)
    if last_global.rope is not None:
        fields |= rope_fields(last_global.rope, last_global.head_dim, arch)
    return {key.format(arch=arch.name): value for key, value in fields.items() if value is not None}


def attention_fields(layer: Layer) -> Attention:
    assert isinstance(layer.mixer, Attention), "the architectures have no other"
    return layer.mixer


def ffn_fields(ffn: FeedForward) -> dict[str, Any]:
    assert isinstance(ffn, MLP | MoE), "the architectures have no other"
    fields: dict[str, Any] = {LLM.FEED_FORWARD_LENGTH: ffn.intermediate_size}
    if isinstance(ffn, MoE):
        fields |= {LLM.EXPERT_COUNT: ffn.experts, LLM.EXPERT_USED_COUNT: ffn.top_k}
        fields[LLM.EXPERT_FEED_FORWARD_LENGTH] = ffn.intermediate_size
        fields[LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH] = ffn.shared_intermediate_size or None
    return fields


def window_fields(layers: list[Attention], arch: Architecture) -> dict[str, Any]:
    """Fields of sliding windows and their RoPE."""
    local = [attention for attention in layers if attention.window is not None]
    if not local or arch.window_period is None:
        return {}
    fields: dict[str, Any] = {ATTENTION.SLIDING_WINDOW: local[0].window}
    if arch.local_rope and local[0].rope is not None:
        fields[ROPE.FREQ_BASE_SWA] = float(local[0].rope.theta)
    pattern = [attention.window is not None for attention in layers]
    if pattern != default_window_layers(len(layers), arch.window_period):
        fields[ATTENTION.SLIDING_WINDOW_PATTERN] = pattern
    return fields


def default_window_layers(count: int, period: int) -> list[bool]:
    """Whether each layer has a sliding window, for files without a pattern."""
    return [(i + 1) % period > 0 for i in range(count)]


def scale_fields(spec: DecoderSpec, attention: Attention, arch: Architecture) -> dict[str, Any]:
    """Fields of softcaps and scales, for architectures that read them."""
    fields: dict[str, Any] = {}
    if arch.softcaps:
        fields |= {LLM.ATTN_LOGIT_SOFTCAPPING: attention.softcap, LLM.FINAL_LOGIT_SOFTCAPPING: spec.logit_softcap}
    if arch.has_scales:
        fields |= {LLM.EMBEDDING_SCALE: float(spec.embed_scale), LLM.RESIDUAL_SCALE: float(spec.residual_scale)}
        fields |= {ATTENTION.SCALE: attention.scale, LLM.LOGIT_SCALE: 1 / spec.logit_scale}
    if arch.yarn_ramp and attention.temperature_tuning is not None:
        fields[ATTENTION.TEMPERATURE_SCALE] = float(attention.temperature_tuning.beta)
    return fields


def rope_fields(rope: Rope, head_dim: int, arch: Architecture) -> dict[str, Any]:
    fields: dict[str, Any] = {ROPE.FREQ_BASE: float(rope.theta), ROPE.DIMENSION_COUNT: rope.dims or head_dim}
    match rope.scaling:
        case LinearScaling(factor):
            fields |= {ROPE.SCALING_TYPE: RopeScalingType.LINEAR.value, ROPE.SCALING_FACTOR: float(factor)}
        case YarnScaling() as yarn:
            fields |= {ROPE.SCALING_TYPE: RopeScalingType.YARN.value, ROPE.SCALING_FACTOR: float(yarn.factor)}
            fields[ROPE.SCALING_ORIG_CTX_LEN] = yarn.context
            fields[ROPE.SCALING_ATTN_FACTOR] = yarn.attention_factor / yarn_attn_factor(yarn.factor)
            if arch.yarn_ramp:
                fields |= {ROPE.SCALING_YARN_BETA_FAST: float(yarn.fast), ROPE.SCALING_YARN_BETA_SLOW: float(yarn.slow)}
        case LongRopeScaling() as longrope:
            fields[ROPE.SCALING_TYPE] = RopeScalingType.LONGROPE.value
            fields[ROPE.SCALING_ATTN_FACTOR] = float(longrope.attention_factor)
            fields[ROPE.SCALING_ORIG_CTX_LEN] = longrope.context
    return fields


def yarn_attn_factor(factor: float) -> float:
    """Factor on cos and sin in llama.cpp's YaRN, in addition to SCALING_ATTN_FACTOR."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
