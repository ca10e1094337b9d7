"""A built config as data: every field written out, so that it can be read back, kept and compared."""

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from itertools import zip_longest
from typing import Any

import yaml

from tunekit.config.choices import ChoiceRegistry, FieldSlot, element_type, field_slots, generic_args, kind_name
from tunekit.config.interpolate import escape_references
from tunekit.config.scalar import BOOL, FLOAT, INT, NULL


def to_plain_config(value: Any, recipe: str | None = None) -> dict[str, Any]:
    """The complete config as plain data, in the order of the fields, `kind` first where there is a choice."""
    head = {} if recipe is None else {"recipe": recipe}
    return {
        **head,
        **{name: to_plain_value(getattr(value, name), slot.hint) for name, slot in field_slots(type(value)).items()},
    }


def to_plain_value(value: Any, hint: Any) -> Any:
    """A value of the type `hint` as plain data."""
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
    """The complete config as YAML; `load(type(value), dump(value)) == value`."""
    return to_yaml(to_plain_config(value, recipe))


def to_yaml(plain: dict[str, Any]) -> str:
    """Plain data as YAML that reads as the same."""
    return yaml.dump(_escaped(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)


def _escaped(data: Any) -> Any:
    """Values that hold `${` are no references; keys never are."""
    if isinstance(data, dict):
        return {key: _escaped(child) for key, child in data.items()}
    if isinstance(data, list):
        return [_escaped(item) for item in data]
    return escape_references(data) if isinstance(data, str) else data


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every value that differs between two resolved configs; None where there is none.

    Of two kinds, what only one of them can be told is no difference beside the kind itself; nor is that of a choice
    which only one of two lists has.
    """
    return _differences("", old, new)


def _differences(at: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        other = old.get("kind") != new.get("kind")
        keys = [key for key in dict.fromkeys([*old, *new]) if key == "kind" or not other or (key in old and key in new)]
        pairs = [(key, old.get(key), new.get(key)) for key in keys]
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and (len(old) == len(new) or _kinds(old, new)):
        pairs = [(str(i), was, now) for i, (was, now) in enumerate(zip_longest(old, new, fillvalue={"kind": None}))]
    else:
        same = (
            old is new or (old == new and isinstance(old, bool) == isinstance(new, bool)) or (old != old and new != new)
        )
        return [] if same else [(at, old, new)]
    return [found for key, was, now in pairs for found in _differences(f"{at}.{key}" if at else key, was, now)]


def _kinds(*lists: list[Any] | tuple[Any, ...]) -> bool:
    """Whether lists hold choices, each of which names its kind."""
    return all(isinstance(item, Mapping) and "kind" in item for items in lists for item in items)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever our reader or a YAML 1.1 reader would take for something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    """Numbers and words stand in one line."""
    short = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=short)


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    """Line breaks that few know: read back from other quotes, they would be another, or a space."""
    quotes = '"' if _BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


_BREAKS = re.compile("[\x85\u2028\u2029]")
_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _text)
_PYTHON_NONE = re.compile("None")  # refused unquoted, where null may be meant
for _name, _words in {"null": NULL, "none": _PYTHON_NONE, "bool": BOOL, "int": INT, "float": FLOAT}.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_words.pattern})$"), None)
