"""Config values with their source locations."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.config.errors import ErrorCollector, Path

COMMAND = "command line"
FAILED: Any = object()  # value whose error has already been reported
DEPTH = 32  # maximum levels of nesting


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A scalar, a dict of nodes or a list of nodes. Immutable, because aliases share nodes."""

    value: Any
    at: str = ""
    text: str | None = None  # original text of an unquoted scalar
    bare: bool = False  # whether the value is a kind without `kind:`

    def items(self) -> Iterator[tuple[str, "YamlNode"]]:
        """Keys or indices, and the nodes below them."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((str(i), child) for i, child in enumerate(self.value))

    def children(self) -> Iterator["YamlNode"]:
        yield from (child for _, child in self.items())

    def find(self, path: Path) -> "YamlNode":
        """Node at `path`, or its nearest ancestor in the config."""
        if not path or not isinstance(self.value, dict) or path[0] not in self.value:
            return self
        return self.value[path[0]].find(path[1:])


def to_plain(node: YamlNode) -> Any:
    """Convert nodes to plain data without locations."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return None if node.value is FAILED else node.value


def to_node(value: Any, at: str, problems: ErrorCollector, path: Path = ()) -> YamlNode:
    """Convert plain data to nodes with the location `at`."""
    if len(path) > DEPTH:
        problems.add(at, path[:4], f"nested deeper than {DEPTH} levels")
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                problems.add(at, (*path, str(key)), f"keys are text, got {key!r}")
        return YamlNode({str(key): to_node(child, at, problems, (*path, str(key))) for key, child in value.items()}, at)
    elif isinstance(value, list | tuple):
        return YamlNode([to_node(child, at, problems, (*path, str(i))) for i, child in enumerate(value)], at)
    elif value is None or isinstance(value, str | int | float):
        return YamlNode(value, at)
    else:
        problems.add(at, path, f"expected plain data, got {type(value).__name__}")
    return YamlNode(FAILED, at)
