"""What llama.cpp makes of a file: its fields as a DecoderSpec, so that what a file cannot say is found out."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from gguf import RopeScalingType

from tunekit.errors import UserError
from tunekit.export.architecture import Architecture
from tunekit.export.metadata import ATTENTION, LLM, ROPE, growth, usual
from tunekit.models.rope import frequencies, scaled
from tunekit.models.spec import (
    MLP,
    Attention,
    DecoderSpec,
    Layer,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Norm,
    Rope,
    Scaling,
    YarnScaling,
)

BASE = 10_000.0  # of rotations where a file does not say it
CAPS = 50.0, 30.0  # of scores and of logits, likewise
NEAR = 1e-6  # fields are fp32


@dataclass(frozen=True)
class Told:
    """A file: its fields, the names of its tensors (ours), and the divisors of its frequencies if it has them."""

    said: Mapping[str, Any]
    arch: Architecture
    names: Collection[str]
    divisors: tuple[float, ...] | None = None

    def field(self, key: str, default: Any = None) -> Any:
        return self.said.get(key.format(arch=self.arch.name), default)

    def spec(self) -> DecoderSpec:
        """The model. Norms multiply by what is stored: nothing is added."""
        norm = Norm(self.field(ATTENTION.LAYERNORM_RMS_EPS))
        dim = self.field(LLM.EMBEDDING_LENGTH)
        return DecoderSpec(
            vocab=self.field(LLM.VOCAB_SIZE),
            dim=dim,
            layers=tuple(self.layers(norm)),
            norm=norm,
            tied="head.weight" not in self.names,
            context=self.field(LLM.CONTEXT_LENGTH),
            embed_scale=dim**0.5 if self.arch.scaled else 1.0,
            logit_softcap=self.field(LLM.FINAL_LOGIT_SOFTCAPPING, CAPS[1]) if self.arch.caps else None,
        )

    def layers(self, norm: Norm) -> Iterator[Layer]:
        mixer = self.attention(norm)
        ffn = MLP(self.field(LLM.FEED_FORWARD_LENGTH), self.arch.act, self.biased("mlp.down_proj"))
        window = self.field(ATTENTION.SLIDING_WINDOW)
        for looks_back in self.looking_back():
            here = replace(mixer, rope=self.rope(looks_back), window=window if looks_back else None)
            yield Layer(here, ffn, post_norm=self.arch.post_norm)

    def attention(self, norm: Norm) -> Attention:
        arch, heads, dim = self.arch, self.field(ATTENTION.HEAD_COUNT), self.field(LLM.EMBEDDING_LENGTH)
        head_dim = dim // heads if arch.square else self.field(ATTENTION.KEY_LENGTH)
        wide = self.field(LLM.BLOCK_COUNT) == arch.wide
        return Attention(
            heads,
            self.field(ATTENTION.HEAD_COUNT_KV),
            head_dim,
            bias=self.biased("attn.q_proj"),
            out_bias=self.biased("attn.o_proj"),
            qk_norm=norm if arch.qk_norm else None,
            scale=(dim // heads if wide else head_dim) ** -0.5,
            softcap=self.field(LLM.ATTN_LOGIT_SOFTCAPPING, CAPS[0]) if arch.caps else None,
        )

    def biased(self, name: str) -> bool:
        return name in self.arch.biases and f"layers.0.{name}.bias" in self.names

    def looking_back(self) -> list[bool]:
        """Which layers look back over a window."""
        count = self.field(LLM.BLOCK_COUNT)
        if self.arch.pattern is None or self.field(ATTENTION.SLIDING_WINDOW) is None:
            return [False] * count
        return self.field(ATTENTION.SLIDING_WINDOW_PATTERN, usual(count, self.arch.pattern))

    def rope(self, looks_back: bool) -> Rope:
        dims = self.field(ROPE.DIMENSION_COUNT)
        dims = None if dims == self.field(ATTENTION.KEY_LENGTH) else dims
        if looks_back and self.arch.own_base:
            return Rope(self.field(ROPE.FREQ_BASE_SWA, BASE), dims, paired=self.arch.paired)
        return Rope(self.field(ROPE.FREQ_BASE, BASE), dims, self.scaling(), paired=self.arch.paired)

    def scaling(self) -> Scaling | None:
        """YaRN's ramp always stands between 32 turns and 1: no architecture here reads another one from its file."""
        context, factor = self.field(LLM.CONTEXT_LENGTH), self.field(ROPE.SCALING_FACTOR)
        if self.divisors is not None and self.arch.divisors:
            return LongScaling(self.divisors, self.divisors, context, 1.0)
        if factor is None:
            return None
        if self.field(ROPE.SCALING_TYPE) == RopeScalingType.YARN.value:
            amplitude = growth(factor) * self.field(ROPE.SCALING_ATTN_FACTOR, 1.0)
            return YarnScaling(factor, self.field(ROPE.SCALING_ORIG_CTX_LEN, context), amplitude=amplitude)
        return LinearScaling(factor)


def divisors(rope: Rope | None, head_dim: int) -> tuple[float, ...] | None:
    """By what the stretched frequencies of Llama 3.1 are smaller than plain ones (head_dim / 2,)."""
    if rope is None or not isinstance(rope.scaling, Llama3Scaling):
        return None
    return tuple((frequencies(rope, head_dim) / scaled(rope, head_dim)[0]).tolist())


def agree(spec: DecoderSpec, told: DecoderSpec, name: str, where: str) -> None:
    """Refuse a model of which the file says something else."""
    found = next(differences(comparable(spec, spec.context), comparable(told, spec.context)), None)
    if found is not None:
        path, mine, theirs = found
        raise UserError(f"{where}: llama.cpp's {name!r} cannot run this model: {path} is {mine}, and there {theirs}")


def comparable(value: Any, context: int) -> Any:
    """A part of a spec without what makes no difference to the logits, or is told by the tensors."""
    match value:
        case Norm():
            return replace(value, offset=0.0, late=False)  # offsets are added to what is written
        case Attention():
            rope = value.rope and turning(value.rope, value.head_dim, context)
            scale = value.head_dim**-0.5 if value.scale is None else value.scale
            return replace(value, rope=rope, scale=scale, qk_norm=comparable(value.qk_norm, context))
        case DecoderSpec():
            layers = tuple(comparable(layer, context) for layer in value.layers)
            return replace(value, layers=layers, norm=comparable(value.norm, context), std=0.0)
        case Layer():
            return replace(value, mixer=comparable(value.mixer, context))
    return value


def turning(rope: Rope, head_dim: int, context: int) -> Rope:
    """A rotation whose stretched waves are divisors and whose channels stand in halves."""
    table = divisors(rope, head_dim)
    scaling = rope.scaling if table is None else LongScaling(table, table, context, 1.0)
    return replace(rope, scaling=scaling, paired=False, dims=rope.dims or head_dim)


def differences(mine: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two values differ: the path to it, and both."""
    own, other = within(mine), within(theirs)
    if own and own.keys() == other.keys():
        for name in own:
            yield from differences(own[name], other[name], f"{path}.{name}".lstrip("."))
    elif not same(mine, theirs):
        yield path, mine, theirs


def within(value: Any) -> dict[str, Any]:
    """The fields of a part of a spec, the items of a row."""
    if isinstance(value, tuple):
        return {str(i): item for i, item in enumerate(value)}
    return {one.name: getattr(value, one.name) for one in fields(value)} if is_dataclass(value) else {}


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=NEAR)
    return mine == theirs
