"""Converts a GGUF file to the spec of the model that llama.cpp runs, which may differ from the exported model."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gguf import RopeScalingType

from tunekit.export.architecture import DIVISORS, LONG, SHORT, Architecture
from tunekit.export.metadata import ATTENTION, LLM, ROPE, default_window_layers, yarn_attn_factor
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
    Norm,
    Rope,
    Scaling,
    YarnScaling,
)

DEFAULT_ROPE_BASE = 10_000.0  # if a file has no RoPE base
DEFAULT_SOFTCAPS = 50.0, 30.0  # of attention scores and logits
DEFAULT_YARN_RAMP = 32.0, 1.0  # beta_fast and beta_slow
RopeFactors = Mapping[str, tuple[float, ...]]


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
