"""Configs as plain data with every field, to be saved, loaded and compared."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from itertools import zip_longest
from typing import Any

import yaml

from tunekit.config.choices import (
    REQUIRED,
    ChoiceRegistry,
    FieldSlot,
    element_type,
    field_slots,
    generic_args,
    kind_name,
)
from tunekit.config.interpolate import escape_references
from tunekit.config.scalar import BOOL, FLOAT, INT, NULL

NO_DEFAULT = "(required)"  # instead of the default of a required key
DISABLED = (None, False, 0, "none", "", (), [], {})  # values that `format_option` leaves out


def to_plain_config(value: Any, recipe: str | None = None) -> dict[str, Any]:
    """Convert a complete config to plain data in field order; `kind` comes first where several kinds exist."""
    head = {} if recipe is None else {"recipe": recipe}
    return {
        **head,
        **{name: to_plain_value(getattr(value, name), slot.hint) for name, slot in field_slots(type(value)).items()},
    }


def to_plain_value(value: Any, hint: Any) -> Any:
    """Convert a value of the type `hint` to plain data."""
    if is_dataclass(value):
        known = [*ChoiceRegistry().kinds(FieldSlot(hint)).values()]
        kind = {} if known == [type(value)] else {"kind": kind_name(type(value))}
        return {**kind, **to_plain_config(value)}
    if isinstance(value, tuple):
        arguments = generic_args(hint, tuple) or (None, ...)
        return [to_plain_value(item, element_type(arguments, i)) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        arguments = generic_args(hint, dict) or (str, None)
        return {key: to_plain_value(child, arguments[1]) for key, child in value.items()}
    return value


def dump_yaml(value: Any, recipe: str | None = None) -> str:
    """Convert a complete config to YAML; `load_config(type(value), dump_yaml(value)) == value`."""
    return to_yaml(to_plain_config(value, recipe))


def to_yaml(plain: dict[str, Any]) -> str:
    """Convert plain data to YAML that loads as the same data."""
    return yaml.dump(_escaped(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)


def _escaped(data: Any) -> Any:
    """Escape `${` in values. Keys are never references."""
    if isinstance(data, dict):
        return {key: _escaped(child) for key, child in data.items()}
    if isinstance(data, list):
        return [_escaped(item) for item in data]
    return escape_references(data) if isinstance(data, str) else data


def changed_keys(config: Any, base: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, default, value) of each value of a complete config that differs from its default, as plain data.

    The default of a required key is the text `(required)`. Keys of a kind that is not the default one are compared
    with its defaults.
    """
    for name, slot in field_slots(type(config), base).items():
        value = getattr(config, name)
        default = NO_DEFAULT if slot.default is REQUIRED else slot.default
        if is_dataclass(value):
            same_kind = type(default) is type(value)
            if not same_kind and "kind" in (plain := to_plain_value(value, slot.hint)):
                yield name, kind_name(type(default)) if is_dataclass(default) else default, plain["kind"]
            nested = changed_keys(value, default if same_kind else None)
            yield from ((f"{name}.{key}", was, now) for key, was, now in nested)
        elif value != default:
            yield name, to_plain_value(default, slot.hint), to_plain_value(value, slot.hint)


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every value that differs between two resolved configs; None for a missing value.

    If the kinds of two sections differ, keys that only one of them has are not reported. Neither are the keys of a list
    element that only one list has.
    """
    return _differences("", old, new)


def format_option(value: Any) -> str:
    """Format a config section in one line: its kind and the options that are enabled."""
    if isinstance(value, Mapping):
        enabled = {key: child for key, child in value.items() if key != "kind" and child not in DISABLED}
        options = [f"{key} {format_option(child)}" for key, child in enabled.items()]
        return ", ".join(([str(value["kind"])] if "kind" in value else []) + options)
    if isinstance(value, list | tuple):
        return " ".join(map(format_option, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _differences(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        kinds_differ = old.get("kind") != new.get("kind")
        keys = [
            key
            for key in dict.fromkeys([*old, *new])
            if key == "kind" or not kinds_differ or (key in old and key in new)
        ]
        pairs = [(key, old.get(key), new.get(key)) for key in keys]
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and (len(old) == len(new) or _kinds(old, new)):
        pairs = [
            (str(i), old_value, new_value)
            for i, (old_value, new_value) in enumerate(zip_longest(old, new, fillvalue={"kind": None}))
        ]
    else:
        equal = (
            old is new or (old == new and isinstance(old, bool) == isinstance(new, bool)) or (old != old and new != new)
        )
        return [] if equal else [(path, old, new)]
    return [
        difference for key, was, now in pairs for difference in _differences(f"{path}.{key}" if path else key, was, now)
    ]


def _kinds(*lists: list[Any] | tuple[Any, ...]) -> bool:
    """Whether all elements of the lists are mappings with a `kind`."""
    return all(isinstance(item, Mapping) and "kind" in item for items in lists for item in items)


class _Dumper(yaml.SafeDumper):
    """Quotes text that this package or a YAML 1.1 parser would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    """Write lists of scalars on one line."""
    short = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=short)


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    """Double-quote text with Unicode line breaks: in other styles, parsers replace them."""
    quotes = '"' if _UNICODE_LINE_BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


_UNICODE_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _text)
_PYTHON_NONE = re.compile("None")  # rejected if unquoted: probably null was intended
for _name, _words in {"null": NULL, "none": _PYTHON_NONE, "bool": BOOL, "int": INT, "float": FLOAT}.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_words.pattern})$"), None)
