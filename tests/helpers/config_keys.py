"""Other values of each key of a config.json, and whether they move the logits of tunekit as those of transformers."""

import copy
import dataclasses
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers

from tests.helpers.random_checkpoints import auto_class, build, load_model, random_tokens
from tests.helpers.transformers_parity import has_experts, max_token_error
from tunekit.errors import UserError
from tunekit.models.families.registry import Family, find_family
from tunekit.models.spec import DecoderSpec

Config = dict[str, Any]
REMOVED = "(removed)"
TOLERANCE = 1e-4  # relative to the largest logit; a soft cap of 0.3 and short-memory states amplify rounding to 2e-5
# Sections and metadata, which no reader of the model's parameters changes.
STRUCTURE = {"model_type", "text_config", "vision_config", "audio_config", "architectures", "transformers_version"}
STRUCTURE |= {"id2label", "label2id", "problem_type", "dtype", "per_layer_config", "auto_map", "quantization_config"}
STRUCTURE |= {"rope_parameters", "rope_scaling", "return_dict", "decoder", "generator"}

ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish", "quick_gelu", "tanh"]
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Values of keys whose type does not say which values are possible.
KNOWN_VALUES: dict[str, list[Any]] = {
    "scoring_func": ["softmax", "sigmoid", "sqrtsoftplus"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "position_embedding_type": ["rope", "nope", "alibi"],
    "normalization_function": ["layernorm"],
    "hybrid_override_pattern": ["M*-", "*M-", "E*M"],
    "use_bidirectional_attention": ["vision", "all"],
    "clip_qkv": [0.5],
    "mamba_dt_limit": [[0.001, 0.1]],
    "layer_types": [[SLIDING] * 3, [FULL] * 3, [LINEAR, FULL, FULL]],
    "rope_theta": [0.5, 1.0, 3.0],
    "partial_rotary_factor": [0.25, 0.5, 0.75, 1.0],
    "original_max_position_embeddings": [4, 16, 128],
    "max_position_embeddings": [8, 16],
    "num_labels": [3],
}
KNOWN_VALUES |= dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act"), ACTIVATIONS)
LAYER_INDICES = ("mlp_only_layers", "cross_attention_layers", "attn_layer_indices", "full_attn_idxs", "moe_layers")
KNOWN_VALUES |= dict.fromkeys(LAYER_INDICES, [[], [0], [1], [0, 1]])

# Bounds between the channel pairs of a small head, so that each key moves them.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 0.1}
YARN |= {"rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[Config] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    YARN,
    LLAMA3 | {"original_max_position_embeddings": 16},
    {"rope_type": "longrope", "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "alpha": 50.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "mrope", "mrope_section": [2, 1, 1]},
    {"rope_type": "ntk", "factor": 2.0},
]
ROPE_VALUES: dict[str, list[Any]] = {
    "factor": [1.0, 0.5, 16.0, None],
    "low_freq_factor": [4.0, 8.0, 0.5],
    "high_freq_factor": [1.0, 0.5, 8.0],
    "original_max_position_embeddings": [4, 8, 64, None, REMOVED],
    "beta_fast": [0.05, 2.0, 32.0, None],
    "beta_slow": [16.0, 1.0, 0.3, None],
    "mscale": [0.5, 2.0],
    "mscale_all_dim": [0.5, 2.0],
    "attention_factor": [0.5, 2.0, -1.0, None],
    "truncate": [False, True, None],
    "partial_rotary_factor": [0.3, 0.5, 0.75, 1.0],
    "rope_theta": [0.5, 1.0, 2.0, 1e6],
    "llama_4_scaling_beta": [0.0, 0.5],
    "alpha": [0.5, 50.0],
}
KEPT_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
# Keys that a type of RoPE may read.
ROPE_KEYS = {
    "default": "partial_rotary_factor rope_theta alpha factor llama_4_scaling_beta",
    "linear": "partial_rotary_factor rope_theta factor attention_factor",
    "yarn": (
        "partial_rotary_factor rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale "
        "mscale_all_dim attention_factor truncate llama_4_scaling_beta"
    ),
    "llama3": (
        "partial_rotary_factor rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor"
    ),
    "longrope": "partial_rotary_factor rope_theta factor original_max_position_embeddings attention_factor",
}


class Change(NamedTuple):
    """A config.json with another value of one key; of several for a RoPE scaling."""

    key: str
    value: Any
    config: Config


def key_changes(config: Config) -> list[Change]:
    """All changes of a config.json that still describe a small model."""
    changes = [*single_changes(config), *outer_changes(config), *rope_changes(config)]
    return [change for change in changes if to_json(change.config) != config]


def to_json(config: Any) -> Any:
    return json.loads(json.dumps(config))


def text_section(config: Config) -> Config:
    return config.get("text_config", config)


def parse(config: Config) -> transformers.PreTrainedConfig:
    """The config in transformers."""
    return transformers.AutoConfig.for_model(**copy.deepcopy(config))


def single_changes(config: Config) -> Iterator[Change]:
    """Changes of the keys of the text model: those that transformers declares or reads, and those of the file."""
    section, parsed = text_section(config), parse(config)
    text = parsed.text_config if "text_config" in config else parsed
    types = {field.name: str(field.type) for field in dataclasses.fields(text)}
    legacy = re.findall(r'kwargs(?:\.get\(|\.pop\(|\[)"(\w+)"', inspect.getsource(type(text)))
    names = dict.fromkeys(
        [*types, *section, *text.attribute_map, *legacy, *keys_read_by_transformers(json.dumps(config)).undeclared]
    )
    for key in names:
        if key in STRUCTURE or key.startswith("_"):
            continue
        current = section[key] if key in section else vars(text).get(text.attribute_map.get(key, key))
        for value in other_values(key, current, types.get(key), key in section):
            yield Change(key, value, with_value(config, (key,), value))


def outer_changes(config: Config) -> Iterator[Change]:
    """Changes of the keys of a multimodal model."""
    if "text_config" not in config:
        return
    parsed = parse(config)
    for field in dataclasses.fields(parsed):
        current = config.get(field.name, vars(parsed).get(field.name))
        if field.name not in STRUCTURE:
            for value in other_values(field.name, current, str(field.type), field.name in config):
                changed = config | {field.name: value}
                if value is REMOVED:
                    del changed[field.name]
                yield Change(f"(outer) {field.name}", value, changed)


class KeysRead(NamedTuple):
    """Keys that the model in transformers looks up when it is built and called."""

    all: frozenset[str]
    undeclared: tuple[str, ...]  # those that its config class does not declare


@cache
def keys_read_by_transformers(config: str) -> KeysRead:
    names: dict[str, bool] = {}
    original = transformers.PreTrainedConfig.__getattribute__

    def record(self: Any, name: str) -> Any:
        names[name] = name not in original(self, "__dict__") and name not in dir(type(self))
        return original(self, name)

    parsed = parse(json.loads(config))
    with mock.patch.object(transformers.PreTrainedConfig, "__getattribute__", record), torch.no_grad():
        auto_class(json.loads(config)).from_config(parsed, attn_implementation="eager").eval()(random_tokens())
    return KeysRead(frozenset(names), tuple(name for name, is_undeclared in names.items() if is_undeclared))


def is_read_by_transformers(config: Config, changed: Config) -> bool:
    """Whether the configs differ in keys that the model looks up. Raises what transformers raises for the values."""
    first, second = parse(config).to_dict(), parse(changed).to_dict()
    sections = (first, second), (first.get("text_config") or {}, second.get("text_config") or {})
    differences = {key for a, b in sections for key in a | b if a.get(key) != b.get(key)} - {"text_config"}
    return not differences.isdisjoint(keys_read_by_transformers(json.dumps(config)).all)


def other_values(key: str, current: Any, declared: str | None, is_in_file: bool) -> list[Any]:
    """Values of the same type, limits, null, and no value. `declared` is the type in transformers."""
    match current:
        case None:
            values = values_of_type(declared)
        case bool():
            values = [not current]
        case int():
            values = [current + 1, max(current - 1, 0), 2 * current, current // 2]
            values += [] if key.endswith("size") else [0, 1]  # norms of few channels amplify rounding
        case float():
            values = [2 * current, current / 2, -current, 0.0, 0.3, 1.0]
        case list() | tuple():
            values = other_lists(list(current))
        case _:
            values = ["other"]
    values = [*KNOWN_VALUES.get(key, []), *values, None, *([REMOVED] if is_in_file else [])]
    return [v for i, v in enumerate(values) if repr(v) != repr(current) and repr(v) not in map(repr, values[:i])]


def values_of_type(declared: str | None) -> list[Any]:
    """Values of a key without one."""
    if declared is None:  # read by transformers with a default
        return [True, False, 1, 4, 0.5]
    samples = {"bool": [True, False], "int": [0, 1, 4], "float": [0.5, 2.0], "str": ["other"]}
    scalar = re.sub(r"(list|dict|tuple)\[[^]]*\]", "", declared)
    return [value for kind, values in samples.items() if kind in scalar for value in values]


def other_lists(current: list[Any]) -> list[list[Any]]:
    if not current:
        return [[0], [1]]
    values = [current[::-1], current[1:] + current[:1], current[:-1], [*current, current[-1]], []]
    if isinstance(current[0], str):
        return [*values, *([item] * len(current) for item in dict.fromkeys(current))]
    if isinstance(current[0], dict):
        return values
    return [*values, [2 * item for item in current if isinstance(item, int | float)], [0] * len(current)]


def with_value(config: Config, path: tuple[str, ...], value: Any) -> Config:
    """The config with a value in its text section."""
    changed = copy.deepcopy(config)
    section = text_section(changed)
    for key in path[:-1]:
        section = section[key]
    if value is REMOVED:
        section.pop(path[-1], None)
    else:
        section[path[-1]] = copy.deepcopy(value)
    return changed


def rope_changes(config: Config) -> Iterator[Change]:
    """All types of RoPE, for all layers and for each type of layers, in the keys of transformers 5 and 4; then each of
    their keys."""
    parsed = parse(config)
    text = parsed.text_config if "text_config" in config else parsed
    current = to_json(vars(text).get("rope_parameters") or {})
    kinds = [kind for kind, value in current.items() if isinstance(value, dict)]
    for scaling in ROPES:
        for kind in kinds:
            path, rope = ("rope_parameters", kind), complete_rope(scaling, current[kind], text)
            nested = with_value(config, ("rope_parameters",), current)
            yield from changes_of_rope(nested, path, rope)
        rope = complete_rope(scaling, current[kinds[0]] if kinds else current, text)
        if kinds:
            yield Change("rope_parameters", rope, with_value(config, ("rope_parameters",), rope))
        else:
            yield from changes_of_rope(config, ("rope_parameters",), rope)
        yield from changes_of_old_rope(config, rope)


def complete_rope(scaling: Config, current: Config, text: transformers.PreTrainedConfig) -> Config:
    """Settings of a type of RoPE, with the base and the rotated channels of the current one."""
    unchanged = {key: current[key] for key in KEPT_ROPE_KEYS if key in current}
    rope = {"rope_theta": 1e4} | unchanged | scaling
    if rope["rope_type"] == "longrope":
        size = vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads
        pairs = range(int(size * rope.get("partial_rotary_factor", 1.0)) // 2)
        rope |= {"short_factor": [1 + i / 5 for i in pairs], "long_factor": [1.5 + i for i in pairs]}
    return rope


def changes_of_rope(config: Config, path: tuple[str, ...], rope: Config) -> Iterator[Change]:
    """A type of RoPE, each of its keys, and the lengths that it may depend on."""
    base, kind, name = with_value(config, path, rope), rope["rope_type"], ".".join(path)
    yield Change(f"{name}.rope_type", rope, base)
    for key in ROPE_KEYS.get(kind, "").split():
        for value in ROPE_VALUES[key]:
            yield Change(f"{name}.{key} ({kind})", value, with_value(base, (*path, key), value))
    if kind in ROPE_KEYS:
        both = with_value(with_value(base, (*path, "mscale"), 0.7), (*path, "mscale_all_dim"), 1.3)
        yield Change(f"{name}.mscale, mscale_all_dim ({kind})", (0.7, 1.3), both)
        for key in ("original_max_position_embeddings", "max_position_embeddings"):
            for value in (8, 16, 32, 128):
                yield Change(f"{key} ({kind})", value, with_value(base, (key,), value))


def changes_of_old_rope(config: Config, rope: Config) -> Iterator[Change]:
    """The keys of transformers 4: with `rope_type`, and with its older name."""
    old = with_value(config, ("rope_parameters",), REMOVED)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    moved = {key: value for key, value in rope.items() if key not in scaling}
    for name in ("rope_type", "type"):
        renamed = {name if key == "rope_type" else key: value for key, value in scaling.items()}
        changed = with_value(old, ("rope_scaling",), renamed)
        text_section(changed).update(moved)
        yield Change(f"rope_scaling.{name}", renamed, changed)


class Outcome(NamedTuple):
    """`kind`: equal, refused, invalid (in transformers), or different; and the reason."""

    kind: str
    reason: str = ""


def compare_logits(config: Config, change: Change) -> Outcome:
    """Build a model with transformers, save it with the changed config.json, and load it with tunekit.

    Nothing is built if neither of the two reads a key that differs from `config`.
    """
    try:
        is_read_by_us = read_family(change.config) != read_family(config)
    except UserError as error:
        return Outcome("refused", str(error))
    with tempfile.TemporaryDirectory() as path, torch.no_grad():
        try:
            if not is_read_by_us and not is_read_by_transformers(config, change.config):
                return Outcome("equal", "read by neither")
            expected = save_with_transformers(change.config, Path(path))
        except Exception as error:  # whatever transformers raises
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        return compare_with_transformers(Path(path), expected, change.key)


def read_family(config: Config) -> tuple[Family, DecoderSpec]:
    return find_family(to_json(config), "config.json")


def save_with_transformers(config: Config, folder: Path) -> torch.Tensor:
    """Logits of a random model, which is saved with this config.json. Raises ArithmeticError if they are not finite."""
    model = build(copy.deepcopy(config))
    logits = model(random_tokens()).logits
    if not logits.isfinite().all():
        raise ArithmeticError("logits are not finite")
    model.save_pretrained(folder)
    file = folder / "config.json"
    (folder / "saved.json").write_text(file.read_text())
    file.write_text(json.dumps(config | {"architectures": [type(model).__name__]}))
    return logits


def compare_with_transformers(folder: Path, expected: torch.Tensor, key: str) -> Outcome:
    """Load the checkpoint and compare its logits, and the model with the one of the config.json of transformers."""
    try:
        model = load_model(folder).eval()
    except UserError as error:
        name = key.split()[-1]
        return Outcome("refused" if name in str(error) else "different", f"the weights do not fit: {error}")
    logits = model(random_tokens())
    if logits.shape != expected.shape:
        return Outcome("different", f"shapes {tuple(logits.shape)} and {tuple(expected.shape)}")
    if not (error := max_token_error(logits, expected, has_experts(model.spec))) < TOLERANCE:
        return Outcome("different", f"logits: {error:.1e}")
    try:
        saved = read_family(json.loads((folder / "saved.json").read_text()))[1]
    except UserError as error:
        return Outcome("different", f"the file saved by transformers is refused: {error}")
    return Outcome("equal") if saved == model.spec else Outcome("different", "the file saved by transformers")
