"""Config values that remember where they were written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.config.problems import Path, Problems

COMMAND = "command line"
FAILED: Any = object()  # stands for a value whose mistake has been told already
DEPTH = 32  # levels of nesting that a config may have


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, a dict of nodes or a list of nodes. Never changed in place: aliases share them."""

    value: Any
    at: str = ""
    text: str | None = None  # an unquoted scalar as it was typed
    bare: bool = False  # a word that names a kind without `kind:`

    def children(self) -> Iterator["Node"]:
        if isinstance(self.value, dict):
            yield from self.value.values()
        elif isinstance(self.value, list):
            yield from self.value

    def find(self, path: Path) -> "Node":
        """The node at `path`, or its nearest ancestor that is written."""
        if not path or not isinstance(self.value, dict) or path[0] not in self.value:
            return self
        return self.value[path[0]].find(path[1:])


def plain(node: Node) -> Any:
    """The data without the places."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return None if node.value is FAILED else node.value


def node_of(value: Any, at: str, problems: Problems, path: Path = ()) -> Node:
    """Plain data as nodes that were all written at `at`."""
    if len(path) > DEPTH:
        problems.add(at, path[:4], f"nested deeper than {DEPTH} levels")
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                problems.add(at, (*path, str(key)), f"keys are text, got {key!r}")
        return Node({str(key): node_of(child, at, problems, (*path, str(key))) for key, child in value.items()}, at)
    elif isinstance(value, list | tuple):
        return Node([node_of(child, at, problems, (*path, str(i))) for i, child in enumerate(value)], at)
    elif value is None or isinstance(value, str | int | float):
        return Node(value, at)
    else:
        problems.add(at, path, f"expected plain data, got {type(value).__name__}")
    return Node(FAILED, at)
