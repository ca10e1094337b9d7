"""A reference may be to a key that is not written: its default is meant."""

from tunekit.config.choices import REQUIRED, Slot
from tunekit.config.dump import plain_value
from tunekit.config.interpolate import child_of, targets
from tunekit.config.node import Node, node_of
from tunekit.config.override import Overrides
from tunekit.config.problems import Path


def written_out(root: Node, cls: type, overrides: Overrides) -> Node:
    """The tree with the defaults that are referred to."""
    for path in dict.fromkeys(targets(root)):
        default = _default(root, Slot(cls), path, overrides)
        if default is not REQUIRED:
            root = overrides.put(root, path, (), node_of(default, root.at, overrides.problems), Slot(cls))
    return root


def _default(root: Node, slot: Slot | None, path: Path, overrides: Overrides) -> object:
    """The default of a key that exists and is not written, as plain data."""
    node: Node | None = root
    for part in path:
        slot = overrides.slot_of(slot, node or Node({}), part)
        node = child_of(node, part) if node else None
    if slot is None or slot.default is REQUIRED or node is not None:
        return REQUIRED
    return plain_value(slot.default, slot.hint)
