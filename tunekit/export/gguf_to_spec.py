"""What llama.cpp makes of a file: its fields as a DecoderSpec, which need not be the model that it was made of."""

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

BASE = 10_000.0  # of rotations where a file does not say it
CAPS = 50.0, 30.0  # of scores and of logits, likewise
RAMP = 32.0, 1.0  # turns at the ends of YaRN's ramp, likewise
Tables = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class GGUFSpec:
    """A file: its fields, the names of its tensors (ours), and those tensors that are no weights."""

    said: Mapping[str, Any]
    arch: Architecture
    names: Collection[str]
    tables: Tables = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        return self.said.get(key.format(arch=self.arch.name), default)

    def spec(self) -> DecoderSpec:
        """The model. Norms multiply by what is stored: nothing is added."""
        arch, dim, norm = self.arch, self.get(LLM.EMBEDDING_LENGTH), Norm(self.get(ATTENTION.LAYERNORM_RMS_EPS))
        scales = {} if not arch.scales else {"residual_scale": self.get(LLM.RESIDUAL_SCALE, 1.0)}
        scales |= {} if not arch.scales else {"logit_scale": 1 / self.get(LLM.LOGIT_SCALE)}
        embed = dim**0.5 if arch.scaled else 1.0
        return DecoderSpec(
            vocab=self.get(LLM.VOCAB_SIZE),
            dim=dim,
            layers=tuple(self.layers(norm)),
            norm=norm,
            tied="head.weight" not in self.names if arch.tied is None else arch.tied,
            context=self.get(LLM.CONTEXT_LENGTH),
            embed_scale=self.get(LLM.EMBEDDING_SCALE, embed) if arch.scales else embed,
            logit_softcap=self.get(LLM.FINAL_LOGIT_SOFTCAPPING, CAPS[1]) if arch.caps else None,
            **scales,
        )

    def layers(self, norm: Norm) -> Iterator[Layer]:
        arch, mixer, ffn = self.arch, self.attention(norm), self.feed_forward()
        window = self.get(ATTENTION.SLIDING_WINDOW)
        for i, looks_back in enumerate(self.looking_back()):
            rope = None if arch.still and (i + 1) % arch.still == 0 else self.rope(looks_back)
            here = replace(mixer, rope=rope, window=window if looks_back else None)
            yield Layer(here, ffn, arch.pre_norm, arch.post_norm)

    def feed_forward(self) -> FeedForward:
        hidden, experts = self.get(LLM.FEED_FORWARD_LENGTH), self.get(LLM.EXPERT_COUNT)
        if self.arch.moe is None or not experts:
            return MLP(hidden, self.arch.act, self.biased("mlp.down_proj"))
        shared = self.get(LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, 0)
        top_k = self.get(LLM.EXPERT_USED_COUNT)
        return replace(self.arch.moe, experts=experts, top_k=top_k, hidden=hidden, shared=shared, act=self.arch.act)

    def attention(self, norm: Norm) -> Attention:
        arch, heads, dim = self.arch, self.get(ATTENTION.HEAD_COUNT), self.get(LLM.EMBEDDING_LENGTH)
        head_dim = dim // heads if arch.square else self.get(ATTENTION.KEY_LENGTH)
        wide = self.get(LLM.BLOCK_COUNT) == arch.wide
        scale = (dim // heads if wide else head_dim) ** -0.5
        return Attention(
            heads,
            self.get(ATTENTION.HEAD_COUNT_KV),
            head_dim,
            bias=self.biased("attn.q_proj"),
            out_bias=self.biased("attn.o_proj"),
            qk_norm=arch.qk_norm and replace(arch.qk_norm, eps=norm.eps),
            scale=self.get(ATTENTION.SCALE, scale) if arch.scales else scale,
            softcap=self.get(LLM.ATTN_LOGIT_SOFTCAPPING, CAPS[0]) if arch.caps else None,
            tuning=self.tuning() if arch.ramp else None,
        )

    def tuning(self) -> AttnTemperatureTuning | None:
        """How queries grow beyond the first context."""
        beta, context = self.get(ATTENTION.TEMPERATURE_SCALE), self.get(LLM.CONTEXT_LENGTH)
        return AttnTemperatureTuning(beta, self.get(ROPE.SCALING_ORIG_CTX_LEN, context)) if beta else None

    def biased(self, name: str) -> bool:
        return name in self.arch.biases and f"layers.0.{name}.bias" in self.names

    def looking_back(self) -> list[bool]:
        """Which layers look back over a window."""
        count, every = self.get(LLM.BLOCK_COUNT), self.arch.window
        if every is None or self.get(ATTENTION.SLIDING_WINDOW) is None:
            return [False] * count
        return self.get(ATTENTION.SLIDING_WINDOW_PATTERN, default_window_layers(count, every))

    def rope(self, looks_back: bool) -> Rope:
        dims = self.get(ROPE.DIMENSION_COUNT, self.get(ATTENTION.KEY_LENGTH))
        if looks_back and self.arch.near:
            return Rope(self.get(ROPE.FREQ_BASE_SWA, BASE), dims, paired=self.arch.paired)
        return Rope(self.get(ROPE.FREQ_BASE, BASE), dims, self.scaling(), paired=self.arch.paired)

    def scaling(self) -> Scaling | None:
        context, factor = self.get(LLM.CONTEXT_LENGTH), self.get(ROPE.SCALING_FACTOR)
        first, grown = self.get(ROPE.SCALING_ORIG_CTX_LEN, context), self.get(ROPE.SCALING_ATTN_FACTOR, 1.0)
        if DIVISORS in self.tables and self.arch.divisors:
            return rope_scaling_factors(self.tables[DIVISORS])
        if LONG in self.tables and self.arch.long:
            return LongRopeScaling(self.tables[SHORT], self.tables[LONG], first, grown)
        if factor is None:
            return None
        if self.get(ROPE.SCALING_TYPE) == RopeScalingType.YARN.value:
            keys = (ROPE.SCALING_YARN_BETA_FAST, ROPE.SCALING_YARN_BETA_SLOW)
            fast, slow = map(self.get, keys, RAMP) if self.arch.ramp else RAMP
            return YarnScaling(factor, first, fast, slow, amplitude=yarn_attn_factor(factor) * grown)
        return LinearScaling(factor)


def rope_scaling_factors(divisors: tuple[float, ...]) -> LongRopeScaling:
    """Frequencies that are divided whatever the length of a row."""
    return LongRopeScaling(divisors, divisors, 0, 1.0)


def rope_factor_tensors(rope: Rope | None, head_dim: int) -> dict[str, tuple[float, ...]]:
    """Tensors that tell how frequencies are divided (dims / 2,): of Llama 3.1, or for short and long rows."""
    match rope and rope.scaling:
        case Llama3Scaling():
            assert rope is not None
            return {DIVISORS: tuple((inv_freq(rope, head_dim) / scaled_inv_freq(rope, head_dim)[0]).tolist())}
        case LongRopeScaling(short, long):
            return {SHORT: short, LONG: long}
    return {}
