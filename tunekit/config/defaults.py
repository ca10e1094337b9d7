"""Defaults of keys that are referenced but not set in the config."""

from tunekit.config.choices import REQUIRED, FieldSlot
from tunekit.config.dump import to_plain_value
from tunekit.config.errors import Path
from tunekit.config.interpolate import get_child, referenced_keys
from tunekit.config.node import YamlNode, to_node
from tunekit.config.overrides import Overrides


def with_defaults(root: YamlNode, cls: type, overrides: Overrides) -> YamlNode:
    """Add the defaults of all referenced keys to the tree."""
    for path in dict.fromkeys(referenced_keys(root)):
        default = _default(root, FieldSlot(cls), path, overrides)
        if default is not REQUIRED:
            root = overrides.put(root, path, (), to_node(default, root.at, overrides.problems), FieldSlot(cls))
    return root


def _default(root: YamlNode, slot: FieldSlot | None, path: Path, overrides: Overrides) -> object:
    """Default of a key that exists and is not set, as plain data; otherwise `REQUIRED`."""
    node: YamlNode | None = root
    for part in path:
        slot = overrides.slot_of(slot, node or YamlNode({}), part)
        node = get_child(node, part) if node else None
    if slot is None or slot.default is REQUIRED or node is not None:
        return REQUIRED
    return to_plain_value(slot.default, slot.hint)
