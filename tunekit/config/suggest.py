"""What a person may have meant by a key or a kind that does not exist."""

import difflib
from collections.abc import Iterable

from tunekit.config.choices import Choices, every_slot, slots
from tunekit.config.problems import Path

_SHOWN = 12  # names that still help when they are listed


def near(word: str, words: Iterable[str]) -> str | None:
    """The most similar of `words`, whatever its case."""
    known = {other.lower(): other for other in words}
    found = difflib.get_close_matches(word.lower(), known, 1)
    return known[found[0]] if found else None


def kind_message(kind: str, kinds: Iterable[str]) -> str:
    kinds = list(kinds)
    nearest = near(kind, kinds)
    meant = f", did you mean '{nearest}'?" if nearest else ";"
    return f"unknown kind '{kind}'{meant} there is {listed(kinds)}"


def key_message(root: type, path: Path, kind: type, kinds: dict[str, type], choices: Choices) -> str:
    """Why the last key of `path` is unknown in the choice `kind`, one of `kinds`, and where it may belong."""
    key, here = path[-1], slots(kind)
    if "." in key:
        head, _, tail = key.partition(".")
        return f"unknown key: in YAML, write `{head}:` and below it, indented, `{tail}:`"
    owners = [name for name, cls in kinds.items() if key in slots(cls)]
    if owners:
        own = next(name for name, cls in kinds.items() if cls is kind)
        return f"unknown key: '{key}' belongs to {', '.join(owners)}; the kind here is {own}"
    below = [(*path[:-1], *rest) for rest, _ in every_slot(kind, choices, 2) if rest[-1] == key]
    places = below or [place for place, _ in every_slot(root, choices) if place[-1] == key]
    places = list(dict.fromkeys(places))[:3]
    if places:
        owners = [".".join(place[:-1]) or "the top level" for place in places]
        return f"unknown key: '{key}' is a key of {listed(owners, 'and')}: write {'.'.join(places[0])}"
    if nearest := near(key, here):
        return f"unknown key, did you mean '{nearest}'?"
    deeper: dict[str, str] = {}
    for rest, _ in every_slot(kind, choices, 2):  # the nearest comes first
        deeper.setdefault(rest[-1], ".".join((*path[:-1], *rest)))
    if nearest := near(key, deeper):
        return f"unknown key, did you mean '{deeper[nearest]}'?"
    return f"unknown key; the keys here are {listed(here, 'and')}" if here else "unknown key; there are no keys here"


def listed(words: Iterable[str], last: str = "or") -> str:
    """`a, b or c`."""
    words = list(words)
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"{len(words) - _SHOWN} more"]
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
