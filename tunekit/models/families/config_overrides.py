"""Overrides of keys of config.json, such as a longer context or another RoPE scaling."""

import copy
from collections.abc import Mapping
from typing import Any

from tunekit.errors import did_you_mean
from tunekit.models.families.base import OPTIONAL, Config, rope_scaling_config
from tunekit.models.families.config_checks import ALLOWED, FLAG, OBJECT, check_config_values

FIXED_KEYS = ("model_type", "architectures", "quantization_config", "text_config")
ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # also in `rope_parameters`, whose values win
# Flags and objects can be overridden only if the file has them: most families do not read them.
KNOWN_KEYS = {key for key, allowed in ALLOWED.items() if allowed not in (FLAG, OBJECT)}
KNOWN_KEYS |= {*OPTIONAL, "rope_scaling", "rope_parameters", "output_router_logits"}
FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
SCALED_CONTEXT = ("llama3", "longrope", "yarn")  # RoPE types that depend on the context before scaling


def override_config(config: Config, overrides: Config) -> dict[str, Any]:
    """config.json with overridden keys, which are those of the text model in multimodal models.

    RoPE scaling is stored where the file has it, with the context before scaling. Raises ValueError with a message
    that starts with the key.
    """
    result = copy.deepcopy(dict(config))
    section = model_section(result)
    known, context = {*KNOWN_KEYS, *section}, original_context(section)
    for key, value in overrides.items():
        if key in FIXED_KEYS or key not in known:
            raise ValueError(f"{key}: {describe_problem(key, known)}")
        section[key] = to_json(value)
        rope = section.get("rope_parameters")
        if key in ROPE_KEYS and isinstance(rope, dict) and key in rope and "rope_parameters" not in overrides:
            rope[key] = value
    check_config_values(section)
    if "rope_scaling" in overrides:
        set_rope_scaling(section, context)
    elif "rope_parameters" in overrides:
        section.pop("rope_scaling", None)  # which would win
    return result


def model_section(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that describes the text model."""
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def describe_problem(key: str, known: set[str]) -> str:
    """Why a key cannot be overridden, with the nearest key."""
    if key in FIXED_KEYS:
        return "cannot be overridden. Remove it."
    hint = did_you_mean(key, known - {*FIXED_KEYS}, "Remove it.")
    return f"not a key of config.json that this model reads.{hint}"


def to_json(value: Any) -> Any:
    """Value with lists instead of tuples."""
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def original_context(section: Config) -> int | None:
    """Context that the model was trained with before its RoPE was scaled."""
    inner = rope_scaling_config(section).get("original_max_position_embeddings")
    return section.get("original_max_position_embeddings") or inner or section.get("max_position_embeddings")


def set_rope_scaling(section: dict[str, Any], context: int | None) -> None:
    """Complete `rope_scaling`, and move it into `rope_parameters` if the file has that."""
    scaling, parameters = section["rope_scaling"] or {"rope_type": "default"}, section.get("rope_parameters")
    # transformers warns about integers.
    scaling |= {key: float(scaling[key]) for key in FLOATS if isinstance(scaling.get(key), int)}
    kind, length = scaling.get("rope_type") or scaling.get("type"), section.get("max_position_embeddings")
    if kind in SCALED_CONTEXT and context is not None and not section.get("original_max_position_embeddings"):
        scaling.setdefault("original_max_position_embeddings", context)
    if kind in ("linear", "yarn") and context and length:
        scaling.setdefault("factor", length / context)
    if not parameters:
        section["rope_scaling"] = scaling if kind != "default" else None
        return
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError("rope_scaling: this model has RoPE settings by layer type. Override rope_parameters.")
    section["rope_parameters"] = {key: parameters[key] for key in ROPE_KEYS if key in parameters} | scaling
    del section["rope_scaling"]
