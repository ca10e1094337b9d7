"""What a person may have meant by a key or a kind that does not exist."""

import difflib
from collections.abc import Iterable, Mapping

from tunekit.config.choices import (
    REQUIRED,
    ChoiceRegistry,
    FieldSlot,
    field_slots,
    generic_args,
    iter_slots,
    union_members,
)
from tunekit.config.errors import Path
from tunekit.config.migration_hints import RENAMED_KINDS, find_hint
from tunekit.config.node import YamlNode

_SHOWN = 12  # names that still help when they are listed


def closest_match(word: str, words: Iterable[str]) -> str | None:
    """The most similar of `words`, whatever its case."""
    known = {other.lower(): other for other in words}
    found = difflib.get_close_matches(word.lower(), known, 1)
    return known[found[0]] if found else None


def unknown_kind_message(kind: str, kinds: Mapping[str, type]) -> str:
    """All kinds are told, by what they say they are `about` where there are many."""
    renamed = RENAMED_KINDS.get(kind)
    nearest = renamed if renamed in kinds else closest_match(kind, kinds)
    meant = f", did you mean '{nearest}'?" if nearest else ";"
    groups: dict[str, list[str]] = {}
    for name, cls in kinds.items() if len(kinds) > _SHOWN else ():
        about = next((vars(base)["description"] for base in cls.__mro__ if "description" in vars(base)), "others")
        groups.setdefault(about, []).append(name)
    told = [f"{about}: {', '.join(names)}" for about, names in groups.items()]
    return (
        f"unknown kind '{kind}'{meant} there is{', ' + '; '.join(told) if len(told) > 1 else f' {join_with_or(kinds)}'}"
    )


def key_for_value(word: str, kind: str | None, kinds: Mapping[str, type]) -> str | None:
    """The only key that the usual kind must be told, if a text may stand there that is no kind."""
    if kind is None or closest_match(word, kinds):
        return None
    needed = [(name, slot) for name, slot in field_slots(kinds[kind]).items() if slot.default is REQUIRED]
    return needed[0][0] if len(needed) == 1 and str in union_members(needed[0][1].hint) else None


def unknown_key_message(
    root: type, path: Path, kind: type, kinds: dict[str, type], choices: ChoiceRegistry, node: YamlNode
) -> str:
    """Why the last key of `path` is unknown in the choice `kind`, one of `kinds`, and where it may belong.

    `node` is what is written beside it.
    """
    key, here = path[-1], field_slots(kind)
    if "." in key:
        head, _, tail = key.partition(".")
        return f"unknown key: in YAML, write `{head}:` and below it, indented, `{tail}:`"
    owners = [name for name, cls in kinds.items() if key in field_slots(cls)]
    if owners:
        own = next(name for name, cls in kinds.items() if cls is kind)
        return f"unknown key: '{key}' belongs to {', '.join(owners)}; the kind here is {own}: name another"
    below = [(*path[:-1], *rest) for rest, _ in iter_slots(kind, choices, 2) if rest[-1] == key]
    whole = [place for place, _ in iter_slots(root, choices)]
    keys = {".".join(part for part in place if part != "0") for place in whole}
    if (len(path) == 1 or not below) and (meant := find_hint(path, keys)):
        if not meant.key:
            return f"unknown key; {meant.how}"
        return f"unknown key; here it is {placed(meant.key, path, root, choices, node)}{meant.how and ': '}{meant.how}"
    places = below or [place for place in whole if place[-1] == key]
    places = list(dict.fromkeys(places))[:3]
    if places:
        owners = [".".join(place[:-1]) or "the top level" for place in places]
        return f"unknown key: '{key}' is a key of {join_with_or(owners, 'and')}: write {'.'.join(places[0])}"
    if nearest := closest_match(key, here):
        return f"unknown key, did you mean '{nearest}'?"
    deeper: dict[str, str] = {}
    for rest, _ in iter_slots(kind, choices, 2):  # the nearest comes first
        deeper.setdefault(rest[-1], ".".join((*path[:-1], *rest)))
    if nearest := closest_match(key, deeper):
        return f"unknown key, did you mean '{deeper[nearest]}'?"
    return (
        f"unknown key; the keys here are {join_with_or(here, 'and')}" if here else "unknown key; there are no keys here"
    )


def placed(key: str, path: Path, root: type, choices: ChoiceRegistry, node: YamlNode) -> str:
    """A key from the top, with the element of a list that is meant: that of `path`, or the first that has the key."""
    parts, above = key.split("."), [part for part in path[:-1] if not part.isdecimal()]
    if above:
        inside = len(above) < len(parts) and above == parts[: len(above)]
        return ".".join((*path[:-1], *parts[len(above) :])) if inside else key
    held, arguments = node.value.get(parts[0]), generic_args(field_slots(root)[parts[0]].hint, tuple)
    if len(parts) == 1 or not arguments or held is None or not isinstance(held.value, list) or len(held.value) < 2:
        return key
    element = FieldSlot(arguments[0])
    has = [parts[1] in choices.inside(element, choices.kind_in(element, item)) for item in held.value]
    return ".".join((parts[0], str(has.index(True) if any(has) else 0), *parts[1:]))


def join_with_or(words: Iterable[str], last: str = "or") -> str:
    """`a, b or c`."""
    words = list(words)
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"{len(words) - _SHOWN} more"]
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
