"""A config that is written from one of another trainer, with comments, and what could not be mapped."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tunekit.config.dump import to_yaml
from tunekit.config.interpolate import escape_references
from tunekit.config.secrets import escape_control
from tunekit.importers.foreign_keys import ForeignKeys

Tree = dict[str, Any]  # a section of a config
Effect = Literal["not mapped", "differs", "not needed"]
SIMPLE = re.compile(r"[\w./@+-]+")  # texts that need no quotes in `{}`
UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")  # and not escaped in JSON
# Order of the keys in a written config; the others follow.
ORDER = ("model", "adapter", "quantization", "data", "eval_data", "teacher", "loss", "reference", "rewards", "sampling")
SECTION_ORDER = ("kind", "source", "split", "max_length")
LAST = ("transforms", "datasets", "output_dir")


class Finding(NamedTuple):
    """A key of the original that has no counterpart (`not mapped`), or a different or no effect here."""

    effect: Effect
    key: str
    value: Any
    note: str

    def __str__(self) -> str:
        value = to_yaml({"x": self.value}).strip()[3:] if not isinstance(self.value, dict | list) else "..."
        value = value if len(value) < 60 and "\n" not in value else "..."
        return to_single_line(f"{self.key}: {value} - {self.note}")


@dataclass
class Draft:
    """Keys of a config of a recipe, comments for some of them, and findings on keys of the original."""

    recipe: str = "sft"
    tree: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    launch: list[str] = field(default_factory=list)  # options of `tune run`

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key. A kind that was set as a word becomes a mapping if one of its keys is set."""
        *sections, name = key.split(".")
        node = self.tree
        for section in sections:
            child = node.get(section)
            if not isinstance(child, dict):
                child = {} if child is None else {"kind": child}
            node[section] = child
            node = child
        if isinstance(node.get(name), dict) and isinstance(value, str):
            node[name] = {"kind": value, **{k: v for k, v in node[name].items() if k != "kind"}}
        else:
            node[name] = value
        if comment:
            self.comments[key] = comment

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a dotted key."""
        node: Any = self.tree
        for name in key.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return default
            node = node[name]
        return node

    def drop(self, key: str, value: Any, note: str) -> None:
        """Report a key without a counterpart."""
        self.findings.append(Finding("not mapped", key, value, note))

    def differs(self, key: str, value: Any, note: str) -> None:
        """Report a key that is mapped, with another meaning or value."""
        self.findings.append(Finding("differs", key, value, note))

    def report_unneeded(self, key: str, value: Any, note: str) -> None:
        """Report a key without an effect here."""
        self.findings.append(Finding("not needed", key, value, note))

    def report_unneeded_keys(self, keys: ForeignKeys, note: str, *names: str) -> None:
        """Read keys that have no effect in this config, and report those that are set."""
        for name in names:
            if name in keys and (value := keys.take(name)) not in (None, False, ""):
                self.report_unneeded(keys.dotted(name), value, note)

    def format(self, heading: str) -> str:
        """The config as YAML, with comments. `heading` says where it is from."""
        lines = [f"# {to_single_line(heading)}"]
        if dropped := [finding for finding in self.findings if finding.effect == "not mapped"]:
            lines += ["# Not mapped:", *(f"#   {finding}" for finding in dropped)]
        tree = {"recipe": self.recipe, **sort_keys(self.tree, ORDER)}
        return "\n".join([*lines, *self.format_lines(tree, "", "")]) + "\n"

    def format_lines(self, tree: Mapping[str, Any], path: str, indent: str) -> Iterator[str]:
        """Lines of a section, with the comments of its keys."""
        for key, value in tree.items():
            dotted = f"{path}.{key}" if path else key
            if comment := self.comments.get(dotted):
                yield f"{indent}# {to_single_line(comment)}"
            has_comments = any(name.startswith(f"{dotted}.") for name in self.comments)
            if isinstance(value, dict) and value and (has_comments or is_long(value)):
                yield f"{indent}{to_flow_key(key)}:"
                yield from self.format_lines(sort_keys(value, SECTION_ORDER), dotted, indent + "  ")
            elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
                yield f"{indent}{to_flow_key(key)}:"
                for item in value:
                    first, *rest = self.format_lines(sort_keys(item, SECTION_ORDER), f"{dotted}[]", "")
                    yield f"{indent}- {first}"
                    yield from (f"{indent}  {line}" for line in rest)
            else:
                yield f"{indent}{to_flow_key(key)}: {to_flow(value)}"


def sort_keys(section: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """A section with the keys of `order` first, and those of `LAST` last."""
    first = [key for key in order if key in section]
    last = [key for key in LAST if key in section]
    middle = [key for key in section if key not in first and key not in last]
    return {key: section[key] for key in (*first, *middle, *last)}


def is_long(value: Mapping[str, Any]) -> bool:
    """Whether a section is written on several lines."""
    return any(isinstance(child, dict | list) and child for child in value.values()) or len(to_flow(value)) > 80


def to_flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_flow_key(key)}: {to_flow(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_flow, value)) + "]"
    if isinstance(value, str) and not SIMPLE.fullmatch(value):
        return quote(escape_references(value))
    return to_yaml({"x": value}).strip()[3:]


def to_flow_key(key: Any) -> str:
    """A key on one line. Keys are never references."""
    return quote(key) if isinstance(key, str) and not SIMPLE.fullmatch(key) else to_flow(key)


def quote(text: str) -> str:
    """A text in double quotes, with escapes for control characters and line breaks."""
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def to_single_line(text: str) -> str:
    """A text of another config for a comment or a report: without line breaks, which would end the comment."""
    return escape_control(" ".join(text.split()))
