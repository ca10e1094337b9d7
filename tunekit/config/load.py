"""From a YAML file and `key=value` to frozen dataclasses, or to one error that names every mistake."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tunekit.config.build import Builder
from tunekit.config.choices import slots
from tunekit.config.imports import own_choices
from tunekit.config.interpolate import interpolate
from tunekit.config.node import COMMAND, FAILED, Node, plain
from tunekit.config.override import Overrides
from tunekit.config.problems import Problems
from tunekit.config.source import Source, read, shown
from tunekit.config.unwritten import written_out

T = TypeVar("T")


def load(cls: type[T], source: Source, overrides: Sequence[str] = (), imports: Sequence[Path] = ()) -> T:
    """An instance of `cls` from a YAML file (a Path), plain data or YAML text (a str), changed by `key=value`.

    `imports` are Python files whose classes become further choices. All mistakes come in one ConfigError.
    """
    choices = own_choices(cls, imports)
    problems = Problems()
    root = read(source, problems)
    if root.value is FAILED:
        problems.check()
    writer = Overrides(choices, problems)
    root = written_out(writer.apply(root, cls, overrides), cls, writer)
    root = _without_recipe(interpolate(root, problems), cls, problems)
    built = Builder(cls, choices, problems).make(cls, None, {}, (root, ()))
    problems.check()
    return built


def mapping(source: Source) -> dict[str, Any]:
    """A config as plain data with its references resolved, as `dump.differences` compares it; nothing is checked."""
    problems = Problems()
    root = read(source, problems)
    problems.check()
    root = interpolate(root, problems)
    problems.check()
    return plain(root)


def _without_recipe(root: Node, cls: type, problems: Problems) -> Node:
    """The name of the recipe belongs to the file, not to the command line: there it is an unknown key."""
    node = root.value.get("recipe")
    if node is None or node.at == COMMAND or "recipe" in slots(cls):
        return root
    _check_recipe(node, problems)
    return Node({key: child for key, child in root.value.items() if key != "recipe"}, root.at)


def _check_recipe(node: Node, problems: Problems) -> None:
    if not isinstance(node.value, str | None) and node.value is not FAILED:
        problems.add(node.at, ("recipe",), f"expected the name of a recipe, got {shown(node.value)}")
