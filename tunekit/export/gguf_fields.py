"""Converts a model spec to the fields of a GGUF file, and back.

The spec of a file is that of the model that llama.cpp runs, which may differ from the exported model.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gguf import Keys, RopeScalingType

from tunekit.export.architecture import DIVISORS, LONG, SHORT, Architecture
from tunekit.models.rope import inv_freq, scaled_inv_freq
from tunekit.models.spec import (
    MLP,
    Attention,
    AttnTemperatureTuning,
    DecoderSpec,
    FeedForward,
    Layer,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MoE,
    Norm,
    Rope,
    Scaling,
    YarnScaling,
)

LLM, ATTENTION, ROPE = Keys.LLM, Keys.Attention, Keys.Rope
DEFAULT_ROPE_BASE = 10_000.0  # if a file has no RoPE base
DEFAULT_SOFTCAPS = 50.0, 30.0  # of attention scores and logits
DEFAULT_YARN_RAMP = 32.0, 1.0  # beta_fast and beta_slow
RopeFactors = Mapping[str, tuple[float, ...]]


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


@dataclass(frozen=True)
class GGUFSpec:
    """Fields, parameter names and RoPE factor tensors of a GGUF file."""

    fields: Mapping[str, Any]
    arch: Architecture
    parameter_names: Collection[str]
    rope_factors: RopeFactors = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key.format(arch=self.arch.name), default)

    def spec(self) -> DecoderSpec:
        """Spec of the model. Norms have no offset."""
        arch, dim, norm = self.arch, self.get(LLM.EMBEDDING_LENGTH), Norm(self.get(ATTENTION.LAYERNORM_RMS_EPS))
        embed, scales = dim**0.5 if arch.scaled_embeddings else 1.0, {}
        if arch.has_scales:
            scales = {"residual_scale": self.get(LLM.RESIDUAL_SCALE, 1.0), "logit_scale": 1 / self.get(LLM.LOGIT_SCALE)}
        return DecoderSpec(
            vocab=self.get(LLM.VOCAB_SIZE),
            dim=dim,
            layers=tuple(self.layers(norm)),
            norm=norm,
            tie_word_embeddings="head.weight" not in self.parameter_names if arch.tied is None else arch.tied,
            context=self.get(LLM.CONTEXT_LENGTH),
            embed_scale=self.get(LLM.EMBEDDING_SCALE, embed) if arch.has_scales else embed,
            logit_softcap=self.get(LLM.FINAL_LOGIT_SOFTCAPPING, DEFAULT_SOFTCAPS[1]) if arch.softcaps else None,
            **scales,
        )

    def layers(self, norm: Norm) -> Iterator[Layer]:
        arch, mixer, ffn = self.arch, self.attention(norm), self.feed_forward()
        window = self.get(ATTENTION.SLIDING_WINDOW)
        for i, has_window in enumerate(self.window_layers()):
            rope = None if arch.nope_period and (i + 1) % arch.nope_period == 0 else self.rope(has_window)
            attention = replace(mixer, rope=rope, window=window if has_window else None)
            yield Layer(attention, ffn, arch.pre_norm, arch.post_norm)

    def feed_forward(self) -> FeedForward:
        intermediate_size, experts = self.get(LLM.FEED_FORWARD_LENGTH), self.get(LLM.EXPERT_COUNT)
        if self.arch.moe is None or not experts:
            return MLP(intermediate_size, self.arch.act, self.has_bias("mlp.down_proj"))
        shared_size, top_k = self.get(LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, 0), self.get(LLM.EXPERT_USED_COUNT)
        sizes = {"intermediate_size": intermediate_size, "shared_intermediate_size": shared_size}
        return replace(self.arch.moe, experts=experts, top_k=top_k, act=self.arch.act, **sizes)

    def attention(self, norm: Norm) -> Attention:
        arch, heads, dim = self.arch, self.get(ATTENTION.HEAD_COUNT), self.get(LLM.EMBEDDING_LENGTH)
        head_dim = dim // heads if arch.heads_span_width else self.get(ATTENTION.KEY_LENGTH)
        is_width_scaled = self.get(LLM.BLOCK_COUNT) == arch.width_scaled_layers
        scale = (dim // heads if is_width_scaled else head_dim) ** -0.5
        return Attention(
            heads,
            self.get(ATTENTION.HEAD_COUNT_KV),
            head_dim,
            bias=self.has_bias("attn.q_proj"),
            out_bias=self.has_bias("attn.o_proj"),
            qk_norm=arch.qk_norm and replace(arch.qk_norm, eps=norm.eps),
            scale=self.get(ATTENTION.SCALE, scale) if arch.has_scales else scale,
            softcap=self.get(LLM.ATTN_LOGIT_SOFTCAPPING, DEFAULT_SOFTCAPS[0]) if arch.softcaps else None,
            temperature_tuning=self.temperature_tuning() if arch.yarn_ramp else None,
        )

    def temperature_tuning(self) -> AttnTemperatureTuning | None:
        """Scaling of queries beyond the original context."""
        beta, context = self.get(ATTENTION.TEMPERATURE_SCALE), self.get(LLM.CONTEXT_LENGTH)
        return AttnTemperatureTuning(beta, self.get(ROPE.SCALING_ORIG_CTX_LEN, context)) if beta else None

    def has_bias(self, name: str) -> bool:
        return name in self.arch.biases and f"layers.0.{name}.bias" in self.parameter_names

    def window_layers(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        count, period = self.get(LLM.BLOCK_COUNT), self.arch.window_period
        if period is None or self.get(ATTENTION.SLIDING_WINDOW) is None:
            return [False] * count
        return self.get(ATTENTION.SLIDING_WINDOW_PATTERN, default_window_layers(count, period))

    def rope(self, has_window: bool) -> Rope:
        dims = self.get(ROPE.DIMENSION_COUNT, self.get(ATTENTION.KEY_LENGTH))
        if has_window and self.arch.local_rope:
            return Rope(self.get(ROPE.FREQ_BASE_SWA, DEFAULT_ROPE_BASE), dims, interleaved=self.arch.interleaved_rope)
        return Rope(
            self.get(ROPE.FREQ_BASE, DEFAULT_ROPE_BASE), dims, self.scaling(), interleaved=self.arch.interleaved_rope
        )

    def scaling(self) -> Scaling | None:
        factor, attn_factor = self.get(ROPE.SCALING_FACTOR), self.get(ROPE.SCALING_ATTN_FACTOR, 1.0)
        original_context = self.get(ROPE.SCALING_ORIG_CTX_LEN, self.get(LLM.CONTEXT_LENGTH))
        if DIVISORS in self.rope_factors and self.arch.rope_divisors:
            return rope_scaling_factors(self.rope_factors[DIVISORS])
        if LONG in self.rope_factors and self.arch.longrope:
            return LongRopeScaling(self.rope_factors[SHORT], self.rope_factors[LONG], original_context, attn_factor)
        if factor is None:
            return None
        if self.get(ROPE.SCALING_TYPE) == RopeScalingType.YARN.value:
            keys = (ROPE.SCALING_YARN_BETA_FAST, ROPE.SCALING_YARN_BETA_SLOW)
            fast, slow = map(self.get, keys, DEFAULT_YARN_RAMP) if self.arch.yarn_ramp else DEFAULT_YARN_RAMP
            attn_factor *= yarn_attn_factor(factor)
            return YarnScaling(factor, original_context, fast, slow, attention_factor=attn_factor)
        return LinearScaling(factor)


def rope_scaling_factors(divisors: tuple[float, ...]) -> LongRopeScaling:
    """RoPE scaling with the same divisors for any sequence length."""
    return LongRopeScaling(divisors, divisors, 0, 1.0)


def make_rope_factor_tensors(rope: Rope | None, head_dim: int) -> dict[str, tuple[float, ...]]:
    """Tensors of frequency divisors (dims / 2,): one for Llama 3.1, two for LongRoPE."""
    match rope and rope.scaling:
        case Llama3Scaling():
            assert rope is not None
            return {DIVISORS: tuple((inv_freq(rope, head_dim) / scaled_inv_freq(rope, head_dim)[0]).tolist())}
        case LongRopeScaling(short, long):
            return {SHORT: short, LONG: long}
    return {}
