"""Load frozen dataclasses from a YAML file and `key=value` overrides, or raise one error with all problems."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tunekit.config.build import ConfigBuilder
from tunekit.config.choices import REQUIRED, FieldSlot, field_slots
from tunekit.config.dump import to_plain_value
from tunekit.config.errors import ErrorCollector
from tunekit.config.errors import Path as KeyPath
from tunekit.config.interpolate import get_child, referenced_keys, resolve_references
from tunekit.config.node import COMMAND, FAILED, YamlNode, to_node, to_plain
from tunekit.config.overrides import KeywordValues, Overrides
from tunekit.config.user_code import load_user_choices
from tunekit.config.yaml_parser import RECIPE_KEY, Source, check_recipe, read_config

T = TypeVar("T")


def load_config(
    cls: type[T],
    source: Source,
    overrides: Sequence[str] = (),
    imports: Sequence[Path] = (),
    keywords: KeywordValues | None = None,
) -> T:
    """Load `cls` from a YAML file (a Path), plain data or YAML text (a str), with `key=value` overrides or `keywords`.

    `imports` are Python files whose dataclasses become additional kinds. Raises one ConfigError with all errors.
    """
    choices = load_user_choices(cls, imports)
    problems = ErrorCollector()
    root = read_config(source, problems)
    if root.value is FAILED:
        problems.check()
    writer = Overrides(choices, problems)
    root = writer.apply(root, cls, overrides)
    if keywords is not None:
        root = replace(root, at=root.at or keywords.where)
        root = Overrides(choices, problems, keywords.where).apply_keywords(root, cls, keywords.values)
    root = with_defaults(root, cls, writer)
    root = _without_recipe(resolve_references(root, problems), cls, problems)
    built = ConfigBuilder(cls, choices, problems).make(cls, None, {}, (root, ()))
    problems.check()
    return built


def mapping(source: Source) -> dict[str, Any]:
    """Load a config as plain data with references resolved, for `diff_configs`. Keys and values are not validated."""
    problems = ErrorCollector()
    root = read_config(source, problems)
    problems.check()
    root = resolve_references(root, problems)
    problems.check()
    return to_plain(root)


def _without_recipe(root: YamlNode, cls: type, problems: ErrorCollector) -> YamlNode:
    """Remove the top-level key `recipe`. It is valid only in files; as an override it is an unknown key."""
    node = root.value.get(RECIPE_KEY)
    if node is None or node.at == COMMAND or RECIPE_KEY in field_slots(cls):
        return root
    check_recipe(node, problems)
    return YamlNode({key: child for key, child in root.value.items() if key != RECIPE_KEY}, root.at)


def with_defaults(root: YamlNode, cls: type, overrides: Overrides) -> YamlNode:
    """Add the defaults of all referenced keys to the tree."""
    for path in dict.fromkeys(referenced_keys(root)):
        default = _default(root, FieldSlot(cls), path, overrides)
        if default is not REQUIRED:
            root = overrides.put(root, path, (), to_node(default, root.at, overrides.problems), FieldSlot(cls))
    return root


def _default(root: YamlNode, slot: FieldSlot | None, path: KeyPath, overrides: Overrides) -> object:
    """Default of a key that exists and is not set, as plain data; otherwise `REQUIRED`."""
    node: YamlNode | None = root
    for part in path:
        slot = overrides.slot_of(slot, node or YamlNode({}), part)
        node = get_child(node, part) if node else None
    if slot is None or slot.default is REQUIRED or node is not None:
        return REQUIRED
    return to_plain_value(slot.default, slot.hint)
