"""Whether a file says the same as the model: a model of which llama.cpp would run another one is refused."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tunekit.errors import UserError
from tunekit.export.architecture import DIVISORS
from tunekit.export.gguf_to_spec import rope_factor_tensors, rope_scaling_factors
from tunekit.models.spec import Attention, DecoderSpec, Layer, MoE, Norm, Rope

NEAR = 1e-6  # fields are fp32


def check_spec_matches(spec: DecoderSpec, told: DecoderSpec, name: str, where: str) -> None:
    """Refuse a model of which the file says something else."""
    found = next(differences(comparable(spec), comparable(told)), None)
    if found is not None:
        path, mine, theirs = found
        raise UserError(f"{where}: llama.cpp's {name} cannot run this model: {path} is {mine}, and there {theirs}")


def comparable(value: Any) -> Any:
    """A part of a spec without what makes no difference to the logits, or is told by the tensors."""
    match value:
        case Norm():
            return replace(value, offset=0.0, late=False)  # offsets are added to what is written
        case Attention():
            rope = value.rope and turning(value.rope, value.head_dim)
            scale = value.head_dim**-0.5 if value.scale is None else value.scale
            return replace(value, rope=rope, scale=scale, qk_norm=comparable(value.qk_norm))
        case MoE():
            return replace(value, precise=False)
        case DecoderSpec():
            layers = tuple(map(comparable, value.layers))
            return replace(value, layers=layers, norm=comparable(value.norm), std=0.0)
        case Layer():
            return replace(value, mixer=comparable(value.mixer), ffn=comparable(value.ffn))
    return value


def turning(rope: Rope, head_dim: int) -> Rope:
    """A rotation whose stretched waves are divisors and whose channels stand in halves."""
    divisors = rope_factor_tensors(rope, head_dim).get(DIVISORS)
    scaling = rope.scaling if divisors is None else rope_scaling_factors(divisors)
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
    if isinstance(mine, float | int) and isinstance(theirs, float | int):
        return math.isclose(mine, theirs, rel_tol=NEAR)
    return mine == theirs
