"""Suggestions for unknown keys and kinds."""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol, runtime_checkable

from tunekit.config.choices import (
    REQUIRED,
    ChoiceRegistry,
    CodeKind,
    FieldSlot,
    field_slots,
    generic_args,
    iter_slots,
    union_members,
)
from tunekit.config.errors import Path
from tunekit.config.migration_hints import KIND_NOTES, RENAMED_KINDS, find_hint
from tunekit.config.node import YamlNode
from tunekit.errors import closest_match

_MAX_NAMES = 12  # maximum number of names in a message


@runtime_checkable
class DescribedKind(Protocol):
    """Class of a group of kinds that messages list together."""

    description: ClassVar[str]


def unknown_kind_message(kind: str, kinds: Mapping[str, type]) -> str:
    """Error message with all kinds, grouped by their `description` if there are many."""
    if kind.endswith(".py") and any(isinstance(cls, CodeKind) for cls in kinds.values()):
        return f"'{kind}' names a file only. Write {kind}:NAME, with the name of a function or class in it"
    renamed = RENAMED_KINDS.get(kind)
    nearest = renamed if renamed in kinds else closest_match(kind, kinds)
    suggestion = f". Did you mean '{nearest}'?" if nearest else "."
    if kind in KIND_NOTES:
        suggestion = f": {KIND_NOTES[kind]}."
    groups: dict[str, list[str]] = {}
    for name, cls in kinds.items() if len(kinds) > _MAX_NAMES else ():
        groups.setdefault(cls.description if isinstance(cls, DescribedKind) else "others", []).append(name)
    group_texts = [f"{description}: {', '.join(members)}" for description, members in groups.items()]
    names = "; ".join(group_texts) if len(group_texts) > 1 else join_with_or(kinds)
    return f"unknown kind '{kind}'{suggestion} Available: {names}"


def key_for_value(word: str, kind: str | None, kinds: Mapping[str, type]) -> str | None:
    """Only required key of the default kind, if it accepts text and `word` does not resemble a kind."""
    if kind is None or closest_match(word, kinds):
        return None
    needed = [(name, slot) for name, slot in field_slots(kinds[kind]).items() if slot.default is REQUIRED]
    return needed[0][0] if len(needed) == 1 and str in union_members(needed[0][1].hint) else None


def unknown_key_message(
    root: type, path: Path, kind: type, kinds: dict[str, type], choices: ChoiceRegistry, node: YamlNode
) -> str:
    """Error message for the last key of `path`, unknown in `kind` (one of `kinds`), with a suggestion.

    `node` is the mapping that contains the key.
    """
    key, slots = path[-1], field_slots(kind)
    if "." in key:
        head, _, tail = key.partition(".")
        return f"unknown key: in YAML, write `{head}:` and below it, indented, `{tail}:`"
    owners = [name for name, cls in kinds.items() if key in field_slots(cls)]
    if owners:
        kind_text = next(name for name, cls in kinds.items() if cls is kind)
        return f"unknown key: '{key}' belongs to kind {join_with_or(owners)}, and the kind is {kind_text}"
    below = [(*path[:-1], *rest) for rest, _ in iter_slots(kind, choices, 2) if rest[-1] == key]
    all_paths = [place for place, _ in iter_slots(root, choices)]
    keys = {".".join(part for part in place if part != "0") for place in all_paths}
    if (len(path) == 1 or not below) and (row := find_hint(path, keys)):
        if not row.key:
            return f"unknown key; {row.note}"
        return f"unknown key; use {qualified_key(row.key, path, root, choices, node)}{row.note and ': '}{row.note}"
    paths = below or [place for place in all_paths if place[-1] == key]
    paths = list(dict.fromkeys(paths))[:3]
    if paths:
        # The only element of a list needs no index.
        names = [".".join(part for part in place if part != "0") for place in paths]
        owners = [name.rpartition(".")[0] or "the top level" for name in names]
        example = list_example(paths[0], root, choices, node) or names[0]
        return f"unknown key: '{key}' is a key of {join_with_or(owners, 'and')}: write {example}"
    if nearest := closest_match(key, slots):
        return f"unknown key. Did you mean '{nearest}'?"
    nested_keys: dict[str, str] = {}
    for rest, _ in iter_slots(kind, choices, 2):  # breadth-first
        nested_keys.setdefault(rest[-1], ".".join((*path[:-1], *rest)))
    if nearest := closest_match(key, nested_keys):
        return f"unknown key. Did you mean '{nested_keys[nearest]}'?"
    return f"unknown key; available keys: {join_with_or(slots, 'and') if slots else 'none'}"


def list_example(path: Path, root: type, choices: ChoiceRegistry, node: YamlNode) -> str | None:
    """List whose only element has the key at `path`; None unless the list is at the top level and empty."""
    slot, list_node = field_slots(root)[path[0]], node.value.get(path[0])
    if path[1:-1] != ("0",) or slot.default != () or (list_node is not None and list_node.value):
        return None
    arguments = generic_args(slot.hint, tuple)
    kinds = choices.kinds(FieldSlot(arguments[0])) if arguments else {}
    kind = next(kind for kind, cls in kinds.items() if path[-1] in field_slots(cls))
    return f"{path[0]}='[{{kind: {kind}, {path[-1]}: ...}}]'"


def qualified_key(key: str, path: Path, root: type, choices: ChoiceRegistry, node: YamlNode) -> str:
    """Full key including the index of a list element: that of `path`, or the first element that has the key."""
    parts, parents = key.split("."), [part for part in path[:-1] if not part.isdecimal()]
    if parents:
        inside = len(parents) < len(parts) and parents == parts[: len(parents)]
        return ".".join((*path[:-1], *parts[len(parents) :])) if inside else key
    list_node, arguments = node.value.get(parts[0]), generic_args(field_slots(root)[parts[0]].hint, tuple)
    if (
        len(parts) == 1
        or not arguments
        or list_node is None
        or not isinstance(list_node.value, list)
        or len(list_node.value) < 2
    ):
        return key
    element = FieldSlot(arguments[0])
    has = [parts[1] in choices.kind_slots(element, choices.kind_of_node(element, item)) for item in list_node.value]
    return ".".join((parts[0], str(has.index(True) if any(has) else 0), *parts[1:]))


def join_with_or(words: Iterable[str], last: str = "or") -> str:
    """Join names as in `a, b or c`."""
    words = list(words)
    if len(words) > _MAX_NAMES:
        words = [*words[:_MAX_NAMES], f"{len(words) - _MAX_NAMES} more"]
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
