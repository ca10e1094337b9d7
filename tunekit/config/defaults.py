"""A reference may be to a key that is not written: its default is meant."""

from tunekit.config.choices import REQUIRED, FieldSlot
from tunekit.config.dump import to_plain_value
from tunekit.config.errors import Path
from tunekit.config.interpolate import get_child, referenced_keys
from tunekit.config.node import YamlNode, to_node
from tunekit.config.overrides import Overrides


def with_defaults(root: YamlNode, cls: type, overrides: Overrides) -> YamlNode:
    """The tree with the defaults that are referred to."""
    for path in dict.fromkeys(referenced_keys(root)):
        default = _default(root, FieldSlot(cls), path, overrides)
        if default is not REQUIRED:
            root = overrides.put(root, path, (), to_node(default, root.at, overrides.problems), FieldSlot(cls))
    return root


def _default(root: YamlNode, slot: FieldSlot | None, path: Path, overrides: Overrides) -> object:
    """The default of a key that exists and is not written, as plain data."""
    node: YamlNode | None = root
    for part in path:
        slot = overrides.slot_of(slot, node or YamlNode({}), part)
        node = get_child(node, part) if node else None
    if slot is None or slot.default is REQUIRED or node is not None:
        return REQUIRED
    return to_plain_value(slot.default, slot.hint)
