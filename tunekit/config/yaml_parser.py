"""Parse YAML text to nodes with line numbers.

Uses the events of the YAML parser: tags cannot create objects, and depth, aliases and duplicate keys are checked.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as File
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)

from tunekit.config.errors import ErrorCollector, Path
from tunekit.config.node import DEPTH, FAILED, YamlNode, to_node
from tunekit.config.scalar import parse_scalar

Source = File | Mapping[str, Any] | str | None
RECIPE_KEY = "recipe"  # top-level key of config files, which no config class has
SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # as JSON escapes an emoji
_MAX_VALUES = 100_000  # values in a config with aliases expanded


class ParseAborted(Exception):
    """The rest of the text cannot be parsed. The error has already been reported."""


def read_config(source: Source, problems: ErrorCollector) -> YamlNode:
    """Read the top-level mapping of a file, of YAML text (a str) or of plain data; empty if `source` is None."""
    if source is None or isinstance(source, Mapping):
        return to_node(source or {}, "", problems)
    text, name = (source, "") if isinstance(source, str) else (_text(source, problems), str(source))
    if text is None:
        return YamlNode(FAILED, name)
    root = parse_yaml(text, lambda line: f"{name}:{line}" if name else f"line {line}", problems)
    if root.value is FAILED:
        return root
    if root.value is None:
        problems.add(name, (), "is empty; write `key: value` lines, or {} to use all defaults")
    elif not isinstance(root.value, dict):
        hint = " (pass a file as a Path)" if isinstance(source, str) else ""
        problems.add(root.at, (), f"expected `key: value` lines at the top, got {format_value(root.value)}{hint}")
    else:
        return YamlNode(root.value, name)
    return YamlNode(FAILED, name)


def format_value(value: Any) -> str:
    """Format a value for a message, with at most 60 characters."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}..."


def read_recipe(file: File) -> str | None:
    """Recipe that a config names; None without one. Raises ConfigError. Fast: text after the key is not parsed."""
    problems = ErrorCollector()
    text = _text(file, problems) or ""
    node = _parse(text, lambda line: f"{file}:{line}", problems, lambda parser: parser.find(RECIPE_KEY))
    check_recipe(node, problems)
    problems.check()
    return node.value


def check_recipe(node: YamlNode, problems: ErrorCollector) -> None:
    """Add an error if the value of the key `recipe` is not a name."""
    if not isinstance(node.value, str | None) and node.value is not FAILED:
        problems.add(node.at, (RECIPE_KEY,), f"expected the name of a recipe, got {format_value(node.value)}")


def parse_yaml(text: str, place: Callable[[int], str], problems: ErrorCollector) -> YamlNode:
    """Parse the only YAML document in `text`. `place` formats a line number, counted from 1."""
    return _parse(text, place, problems, lambda parser: parser.document())


def _parse(
    text: str, place: Callable[[int], str], problems: ErrorCollector, read: Callable[["_Parser"], YamlNode]
) -> YamlNode:
    try:
        return read(_Parser(text, place, problems))
    except ParseAborted:
        pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        message = error.problem or error.context or "cannot be read"
        _add_syntax_error(text, place, (line, column), message, problems)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        position = before.count("\n"), len(before) - before.rfind("\n") - 1
        _add_syntax_error(text, place, position, f"the character {text[error.position]!r} is not allowed", problems)
    return YamlNode(FAILED, place(1))


def _text(file: File, problems: ErrorCollector) -> str | None:
    """Read the text of a file; None after an error."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
        return text.replace("\t", " ") if "\t" in text and _is_json(text) else text
    except FileNotFoundError:
        problems.add(str(file), (), "no such file")
    except OSError as error:
        problems.add(str(file), (), f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problems.add(f"{file}:{line}", (), "is not UTF-8 text; save it as UTF-8")
    return None


def _is_json(text: str) -> bool:
    """Whether a text is JSON, which is YAML except that tabs may indent it."""
    try:
        return text.lstrip().startswith("{") and bool(json.loads(text))
    except (ValueError, RecursionError):
        return False


def _join_pair(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _add_syntax_error(
    text: str, place: Callable[[int], str], position: tuple[int, int], message: str, problems: ErrorCollector
) -> None:
    line, column = position
    lines = text.splitlines()
    line_text = lines[line] if line < len(lines) else ""
    hint = ""
    if "\t" in line_text[: column + 1]:
        hint = " (there is a tab: indent with spaces)"
    elif "${" in line_text:
        hint = ' (inside [ ] and { }, write "${...}" with quotes)'
    problems.add(f"{place(line + 1)}:{column + 1}", (), f"malformed YAML: {message}{hint}")


def _size_and_depth(node: YamlNode) -> tuple[int, int]:
    """Number of values and of levels. Runs once per alias, in time proportional to the size that the alias adds."""
    children = [_size_and_depth(child) for child in node.children()]
    return 1 + sum(size for size, _ in children), 1 + max((depth for _, depth in children), default=0)


class _Parser:
    def __init__(self, text: str, place: Callable[[int], str], problems: ErrorCollector) -> None:
        self.events: Iterator[Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self.place, self.problems = place, problems
        self.anchors: dict[str, YamlNode] = {}
        self.size = 0

    def document(self) -> YamlNode:
        next(self.events)
        event = next(self.events)
        if isinstance(event, StreamEndEvent):
            return YamlNode(None, self.place(1))
        root = self.node(next(self.events), ())
        next(self.events)
        event = next(self.events)
        if isinstance(event, DocumentStartEvent):
            self.stop(event, (), "second YAML document; a config must be one document")
        return root

    def find(self, name: str) -> YamlNode:
        """Value of a key of the top-level mapping; null without it. Later keys are not parsed."""
        next(self.events)
        merged: list[YamlNode] = []
        if isinstance(next(self.events), DocumentStartEvent) and isinstance(next(self.events), MappingStartEvent):
            while not isinstance(event := next(self.events), MappingEndEvent):
                key, quoted = self.key(event, ())
                value = self.node(next(self.events), (key,))
                if key == name:
                    return value
                merged += self.merged(value, ()) if key == "<<" and not quoted else []
        return next((base.value[name] for base in merged if name in base.value), YamlNode(None))

    def stop(self, event: Event, path: Path, message: str) -> NoReturn:
        self.problems.add(self.at(event), path[:4], message)
        raise ParseAborted

    def at(self, event: Event) -> str:
        return self.place(event.start_mark.line + 1)

    def node(self, event: Event, path: Path) -> YamlNode:
        if isinstance(event, AliasEvent):
            return self.alias(event, path)
        self.grow(event, path, 1, 1)
        assert isinstance(event, ScalarEvent | CollectionStartEvent)
        tag = event.tag
        if tag is not None:
            self.problems.add(self.at(event), path, f"the tag {tag!r} is not allowed: a config is plain data")
        if isinstance(event, ScalarEvent):
            node = self.scalar(event)
        elif isinstance(event, MappingStartEvent):
            node = self.mapping(event, path)
        else:
            node = self.sequence(event, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node if tag is None else YamlNode(FAILED, node.at)

    def grow(self, event: Event, path: Path, size: int, depth: int) -> None:
        self.size += size
        if self.size > _MAX_VALUES:
            self.stop(event, path, f"the config has more than {_MAX_VALUES} values with aliases expanded")
        if len(path) + depth > DEPTH:
            self.stop(event, path, f"nested deeper than {DEPTH} levels")

    def alias(self, event: AliasEvent, path: Path) -> YamlNode:
        if event.anchor not in self.anchors:  # anchors are added after their value, so no value contains itself
            self.stop(event, path, f"the alias *{event.anchor} has no anchor &{event.anchor} before it")
        node = self.anchors[event.anchor]
        self.grow(event, path, *_size_and_depth(node))
        return node

    def scalar(self, event: ScalarEvent) -> YamlNode:
        if event.style:
            return YamlNode(SURROGATE_PAIR.sub(_join_pair, event.value), self.at(event))
        return YamlNode(parse_scalar(event.value), self.at(event), event.value)

    def sequence(self, event: Event, path: Path) -> YamlNode:
        items: list[YamlNode] = []
        while not isinstance(inner := next(self.events), SequenceEndEvent):
            items.append(self.node(inner, (*path, str(len(items)))))
        return YamlNode(items, self.at(event))

    def mapping(self, event: Event, path: Path) -> YamlNode:
        entries: dict[str, YamlNode] = {}
        lines: dict[str, int] = {}
        merged: list[YamlNode] = []
        while not isinstance(inner := next(self.events), MappingEndEvent):
            key, quoted = self.key(inner, path)
            value = self.node(next(self.events), (*path, key))
            if key in lines:
                self.problems.add(self.at(inner), (*path, key), f"written twice, first on line {lines[key]}")
                continue
            lines[key] = inner.start_mark.line + 1
            if key == "<<" and not quoted:
                merged += self.merged(value, path)
            else:
                entries[key] = YamlNode(value.value, self.at(inner), value.text)
        for base in merged:
            entries = {**base.value, **entries}
        return YamlNode(entries, self.at(event))

    def key(self, event: Event, path: Path) -> tuple[str, bool]:
        if not isinstance(event, ScalarEvent):
            self.stop(event, path, "keys must be plain text; quote a key that contains brackets or starts with *")
        node = self.node(event, path)
        if not isinstance(node.value, str) and node.value is not FAILED:
            message = f"keys are text; quote it: {event.value!r}"
            self.problems.add(node.at, (*path, event.value), message)
        return event.value, bool(event.style)

    def merged(self, value: YamlNode, path: Path) -> list[YamlNode]:
        """Mappings of `<<: *base` or `<<: [*a, *b]`, in order of precedence."""
        bases = value.value if isinstance(value.value, list) else [value]
        invalid = [base for base in bases if not isinstance(base.value, dict)]
        for base in invalid:
            self.problems.add(base.at, (*path, "<<"), f"expected a mapping to merge, got {format_value(base.value)}")
        return [base for base in bases if base not in invalid]
