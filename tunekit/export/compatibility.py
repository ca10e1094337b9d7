"""Checks that llama.cpp runs the same model: the spec of a GGUF file must equal the spec of the checkpoint."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tunekit.errors import UserError
from tunekit.export.architecture import DIVISORS
from tunekit.export.gguf_fields import make_rope_factor_tensors, rope_scaling_factors
from tunekit.models.spec import Attention, DecoderSpec, Layer, MoE, Norm, Rope

TOLERANCE = 1e-6  # fields are fp32


def check_spec_matches(spec: DecoderSpec, file_spec: DecoderSpec, name: str, where: str) -> None:
    """Raise UserError if the spec of a file differs from the spec of the model."""
    difference = next(spec_differences(normalize_spec(spec), normalize_spec(file_spec)), None)
    if difference is not None:
        path, expected, actual = difference
        raise UserError(
            f"{where}: llama.cpp's {name} cannot run this model: {path} is {expected}, but {actual} in llama.cpp"
        )


def normalize_spec(value: Any) -> Any:
    """Normalize fields of a spec that do not affect the logits or that are stored in the tensors."""
    match value:
        case Norm():
            return replace(value, offset=0.0, scale_in_fp32=False)  # offsets are added to the written weights
        case Attention():
            rope = value.rope and normalize_rope(value.rope, value.head_dim)
            scale = value.head_dim**-0.5 if value.scale is None else value.scale
            return replace(value, rope=rope, scale=scale, qk_norm=normalize_spec(value.qk_norm))
        case MoE():
            return replace(value, router_in_fp32=False)
        case DecoderSpec():
            layers = tuple(map(normalize_spec, value.layers))
            return replace(value, layers=layers, norm=normalize_spec(value.norm), initializer_range=0.0)
        case Layer():
            return replace(value, mixer=normalize_spec(value.mixer), ffn=normalize_spec(value.ffn))
    return value


def normalize_rope(rope: Rope, head_dim: int) -> Rope:
    """Normalize RoPE to frequency divisors and non-interleaved channels."""
    divisors = make_rope_factor_tensors(rope, head_dim).get(DIVISORS)
    scaling = rope.scaling if divisors is None else rope_scaling_factors(divisors)
    return replace(rope, scaling=scaling, interleaved=False, dims=rope.dims or head_dim)


def spec_differences(expected: Any, actual: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Paths at which two specs differ, with both values."""
    expected_children, actual_children = child_values(expected), child_values(actual)
    if expected_children and expected_children.keys() == actual_children.keys():
        for name in expected_children:
            yield from spec_differences(expected_children[name], actual_children[name], f"{path}.{name}".lstrip("."))
    elif not is_close(expected, actual):
        yield path, expected, actual


def child_values(value: Any) -> dict[str, Any]:
    """Fields of a dataclass or items of a tuple, by name; empty for other values."""
    if isinstance(value, tuple):
        return {str(i): item for i, item in enumerate(value)}
    return {field_.name: getattr(value, field_.name) for field_ in fields(value)} if is_dataclass(value) else {}


def is_close(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float | int) and isinstance(actual, float | int):
        return math.isclose(expected, actual, rel_tol=TOLERANCE)
    return expected == actual
