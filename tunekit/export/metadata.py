"""The numbers of a model as fields of a GGUF file."""

import math
from typing import Any

from gguf import Keys, RopeScalingType

from tunekit.export.architecture import Architecture
from tunekit.models.spec import MLP, Attention, DecoderSpec, Layer, LinearScaling, YarnScaling

LLM, ATTENTION, ROPE = Keys.LLM, Keys.Attention, Keys.Rope


def fields(spec: DecoderSpec, arch: Architecture) -> dict[str, Any]:
    """What a file says of a model. What it has no word for is left out; `told.Told` then differs."""
    layers = [attention(layer) for layer in spec.layers]
    last, ffn = layers[-1], spec.layers[-1].ffn
    assert isinstance(ffn, MLP), "the architectures have no other"
    said = {
        LLM.VOCAB_SIZE: spec.vocab,
        LLM.CONTEXT_LENGTH: spec.context,
        LLM.EMBEDDING_LENGTH: spec.dim,
        LLM.BLOCK_COUNT: len(layers),
        LLM.FEED_FORWARD_LENGTH: ffn.hidden,
        ATTENTION.HEAD_COUNT: last.heads,
        ATTENTION.HEAD_COUNT_KV: last.kv_heads,
        ATTENTION.KEY_LENGTH: last.head_dim,
        ATTENTION.VALUE_LENGTH: last.head_dim,
        ATTENTION.LAYERNORM_RMS_EPS: float(spec.norm.eps),
    }
    if arch.caps:
        said |= {LLM.ATTN_LOGIT_SOFTCAPPING: last.softcap, LLM.FINAL_LOGIT_SOFTCAPPING: spec.logit_softcap}
    said |= windows(layers, arch) | rotation([one for one in layers if one.window is None] or layers, spec.context)
    return {key.format(arch=arch.name): value for key, value in said.items() if value is not None}


def attention(layer: Layer) -> Attention:
    assert isinstance(layer.mixer, Attention), "the architectures have no other"
    return layer.mixer


def windows(layers: list[Attention], arch: Architecture) -> dict[str, Any]:
    """Which layers look back over a window, and how those rotate."""
    near = [one for one in layers if one.window is not None]
    if not near:
        return {}
    said: dict[str, Any] = {ATTENTION.SLIDING_WINDOW: near[0].window}
    if arch.own_base and near[0].rope is not None:
        said[ROPE.FREQ_BASE_SWA] = near[0].rope.theta
    pattern = [one.window is not None for one in layers]
    if arch.pattern is not None and pattern != usual(len(layers), arch.pattern):
        said[ATTENTION.SLIDING_WINDOW_PATTERN] = pattern
    return said


def usual(count: int, pattern: int) -> list[bool]:
    """Which layers look back over a window where a file does not say it."""
    return [(i + 1) % pattern > 0 for i in range(count)]


def rotation(layers: list[Attention], context: int) -> dict[str, Any]:
    rope, head_dim = layers[-1].rope, layers[-1].head_dim
    if rope is None:
        return {}
    said: dict[str, Any] = {ROPE.FREQ_BASE: rope.theta, ROPE.DIMENSION_COUNT: rope.dims or head_dim}
    match rope.scaling:
        case LinearScaling(factor):
            said |= {ROPE.SCALING_TYPE: RopeScalingType.LINEAR.value, ROPE.SCALING_FACTOR: float(factor)}
        case YarnScaling() as yarn:
            said |= {ROPE.SCALING_TYPE: RopeScalingType.YARN.value, ROPE.SCALING_FACTOR: float(yarn.factor)}
            said[ROPE.SCALING_ORIG_CTX_LEN] = yarn.context
            said[ROPE.SCALING_ATTN_FACTOR] = yarn.amplitude / growth(yarn.factor)
    return said


def growth(factor: float) -> float:
    """By how much llama.cpp lets cos and sin grow with YaRN; SCALING_ATTN_FACTOR comes on top."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
