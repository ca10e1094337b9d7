"""Keys of a config of another trainer, and which of them an importer has read."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tunekit.errors import UserError
from tunekit.system import read_utf8

NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)?")
WORDS = {"true": True, "false": False, "null": None, "none": None, "": None}


class ForeignKeys:
    """A section of a config. Each key is read once; all others are reported."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values, self.path = dict(values), path
        self.sections: list[ForeignKeys] = []

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def peek(self, name: str, default: Any = None) -> Any:
        """Value of a key, which is still reported if it is not taken."""
        return self.values.get(name, default)

    def take(self, *names: str, default: Any = None) -> Any:
        """Value of the first of some keys that is set and not null; all of them count as read."""
        values = [self.values.pop(name) for name in names if name in self.values]
        return next((value for value in values if value is not None), default)

    def number(self, *names: str, default: Any = None) -> Any:
        """Take a number, which may be text such as 2e-4."""
        value = self.take(*names)
        if value is None:
            return default
        number = parse_word(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise UserError(f"{self.dotted(names[0])}: must be a number, got {value!r}. Correct it in the original.")
        return number

    def flag(self, *names: str, default: bool = False) -> bool:
        """Take true or false, which may be text."""
        value = self.take(*names)
        value = parse_word(value) if isinstance(value, str) else value
        return default if value is None else bool(value)

    def texts(self, *names: str) -> list[str]:
        """Take a list, or a text with commas."""
        value = self.take(*names)
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
        return [str(item).strip() for item in items if str(item).strip()]

    def numbers(self, *names: str) -> list[float]:
        """Take a list of numbers, one number, or a text with commas."""
        value = self.take(*names)
        items = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]
        return [float(item) for item in items if item is not None]

    def section(self, name: str) -> "ForeignKeys":
        """Keys of a section; empty if it is missing or no mapping."""
        value = self.values.get(name)
        if isinstance(value, Mapping):
            del self.values[name]
            section = ForeignKeys(value, self.dotted(name))
            self.sections.append(section)
            return section
        return ForeignKeys({})

    def dotted(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Dotted key and value of all keys that were not read, of sections too."""
        for name, value in self.values.items():
            yield from flatten(self.dotted(name), value)
        for section in self.sections:
            yield from section.rest()


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings. Lists are values."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from flatten(f"{name}.{key}", child)
    else:
        yield name, value


def parse_word(word: str) -> Any:
    """Value of a word of a command line or of a quoted YAML value: a number, true, false, null, or a text."""
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    if NUMBER.fullmatch(word):
        is_integer = re.fullmatch(r"[-+]?\d[\d_]*", word)
        return int(word) if is_integer else float(word)
    return word


def parse_argument(text: str) -> Any:
    """Value of an argument: as in YAML, where 2e-4 is a number."""
    if isinstance(value := parse_word(text), str) and value[:1] in "[{'\"":
        try:
            value = yaml.load(text, Loader)
        except yaml.YAMLError:
            return text
    return value


class Loader(yaml.SafeLoader):
    """YAML in which 2e-4 is a number, as all these trainers read it, and dates are texts."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp",)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def read_mapping(path: Path) -> dict[str, Any]:
    """Mapping of a YAML or JSON file. Raise UserError for anything else."""
    return parse_mapping(read_utf8(path), str(path))


def parse_mapping(text: str, name: str) -> dict[str, Any]:
    """Mapping of a YAML or JSON text. `name` is its file, for messages."""
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f":{mark.line + 1}" if mark else ""
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise UserError(f"{name}{where}: invalid YAML: {problem}. Correct it.") from None
    if not isinstance(value, dict):
        raise UserError(f"{name}: must be a mapping of keys, got {type(value).__name__}. Pass a config file.")
    return {str(key): child for key, child in value.items()}
