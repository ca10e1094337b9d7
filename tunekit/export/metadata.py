"""The numbers of a model as fields of a GGUF file."""

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
    """What a file says of a model. What it has no word for is left out; `told.Told` then differs."""
    layers = [attention_fields(layer) for layer in spec.layers]
    far = next((one for one in reversed(layers) if one.window is None and one.rope is not None), layers[-1])
    said = {
        LLM.VOCAB_SIZE: spec.vocab,
        LLM.CONTEXT_LENGTH: spec.context,
        LLM.EMBEDDING_LENGTH: spec.dim,
        LLM.BLOCK_COUNT: len(layers),
        ATTENTION.HEAD_COUNT: far.heads,
        ATTENTION.HEAD_COUNT_KV: far.kv_heads,
        ATTENTION.KEY_LENGTH: far.head_dim,
        ATTENTION.VALUE_LENGTH: far.head_dim,
        ATTENTION.LAYERNORM_RMS_EPS: float(spec.norm.eps),
    }
    said |= feed_forward(spec.layers[-1].ffn) | windows(layers, arch) | factors(spec, far, arch)
    if far.rope is not None:
        said |= rotation(far.rope, far.head_dim, arch)
    return {key.format(arch=arch.name): value for key, value in said.items() if value is not None}


def attention_fields(layer: Layer) -> Attention:
    assert isinstance(layer.mixer, Attention), "the architectures have no other"
    return layer.mixer


def feed_forward(ffn: FeedForward) -> dict[str, Any]:
    assert isinstance(ffn, MLP | MoE), "the architectures have no other"
    said: dict[str, Any] = {LLM.FEED_FORWARD_LENGTH: ffn.hidden}
    if isinstance(ffn, MoE):
        said |= {LLM.EXPERT_COUNT: ffn.experts, LLM.EXPERT_USED_COUNT: ffn.top_k}
        said |= {LLM.EXPERT_FEED_FORWARD_LENGTH: ffn.hidden, LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: ffn.shared or None}
    return said


def windows(layers: list[Attention], arch: Architecture) -> dict[str, Any]:
    """Which layers look back over a window, and how those rotate."""
    near = [one for one in layers if one.window is not None]
    if not near or arch.window is None:
        return {}
    said: dict[str, Any] = {ATTENTION.SLIDING_WINDOW: near[0].window}
    if arch.near and near[0].rope is not None:
        said[ROPE.FREQ_BASE_SWA] = float(near[0].rope.theta)
    pattern = [one.window is not None for one in layers]
    if pattern != default_window_layers(len(layers), arch.window):
        said[ATTENTION.SLIDING_WINDOW_PATTERN] = pattern
    return said


def default_window_layers(count: int, every: int) -> list[bool]:
    """Which layers look back over a window where a file does not say it."""
    return [(i + 1) % every > 0 for i in range(count)]


def factors(spec: DecoderSpec, far: Attention, arch: Architecture) -> dict[str, Any]:
    """Bounds and factors on scores and logits, of the architectures that read them."""
    said: dict[str, Any] = {}
    if arch.caps:
        said |= {LLM.ATTN_LOGIT_SOFTCAPPING: far.softcap, LLM.FINAL_LOGIT_SOFTCAPPING: spec.logit_softcap}
    if arch.scales:
        said |= {LLM.EMBEDDING_SCALE: float(spec.embed_scale), LLM.RESIDUAL_SCALE: float(spec.residual_scale)}
        said |= {ATTENTION.SCALE: far.scale, LLM.LOGIT_SCALE: 1 / spec.logit_scale}
    if arch.ramp and far.tuning is not None:
        said[ATTENTION.TEMPERATURE_SCALE] = float(far.tuning.beta)
    return said


def rotation(rope: Rope, head_dim: int, arch: Architecture) -> dict[str, Any]:
    said: dict[str, Any] = {ROPE.FREQ_BASE: float(rope.theta), ROPE.DIMENSION_COUNT: rope.dims or head_dim}
    match rope.scaling:
        case LinearScaling(factor):
            said |= {ROPE.SCALING_TYPE: RopeScalingType.LINEAR.value, ROPE.SCALING_FACTOR: float(factor)}
        case YarnScaling() as yarn:
            said |= {ROPE.SCALING_TYPE: RopeScalingType.YARN.value, ROPE.SCALING_FACTOR: float(yarn.factor)}
            said[ROPE.SCALING_ORIG_CTX_LEN] = yarn.context
            said[ROPE.SCALING_ATTN_FACTOR] = yarn.amplitude / yarn_attn_factor(yarn.factor)
            if arch.ramp:
                said |= {ROPE.SCALING_YARN_BETA_FAST: float(yarn.fast), ROPE.SCALING_YARN_BETA_SLOW: float(yarn.slow)}
        case LongRopeScaling() as long:
            said |= {ROPE.SCALING_TYPE: RopeScalingType.LONGROPE.value, ROPE.SCALING_ATTN_FACTOR: float(long.amplitude)}
            said[ROPE.SCALING_ORIG_CTX_LEN] = long.context
    return said


def yarn_attn_factor(factor: float) -> float:
    """By how much llama.cpp lets cos and sin grow with YaRN; SCALING_ATTN_FACTOR comes on top."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
