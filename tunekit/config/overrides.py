"""Apply `key=value` overrides from the command line, or keyword arguments, to the tree of YAML nodes."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from tunekit.config.choices import (
    REQUIRED,
    ChoiceRegistry,
    FieldSlot,
    element_type,
    generic_args,
    mapping_slots,
    union_members,
)
from tunekit.config.dump import to_plain_value
from tunekit.config.errors import ErrorCollector, Path
from tunekit.config.interpolate import get_child
from tunekit.config.node import COMMAND, DEPTH, FAILED, YamlNode, to_node
from tunekit.config.scalar import parse_scalar
from tunekit.config.yaml_parser import parse_yaml

_QUOTED = ("[", "{", '"', "'")  # values that start with these are parsed as YAML, all others are scalars


@dataclass(frozen=True)
class KeywordValues:
    """Values of config keys from Python, as plain data. A key with dots names a nested key, as on the command line.

    `where` is the call that received them, for messages.
    """

    where: str
    values: Mapping[str, Any]


class Overrides:
    """Writes overrides into a tree. The schema determines the current kind of each section. `at`: their location."""

    def __init__(self, choices: ChoiceRegistry, problems: ErrorCollector, at: str = COMMAND) -> None:
        self.choices, self.problems, self.at = choices, problems, at

    def apply(self, root: YamlNode, cls: type, items: Sequence[str]) -> YamlNode:
        """Apply `items` in order; later items take precedence."""
        for item in items:
            key, equals, text = item.partition("=")
            path = tuple(part.strip() for part in key.split("."))
            if item.startswith("-"):
                self.problems.add(COMMAND, (), f"'{item}' is not an option; set values with key=value")
            elif not equals:
                self.problems.add(COMMAND, (), f"'{item}' has no '='; write key=value")
            elif not all(path):
                self.problems.add(COMMAND, (), f"'{item}' has an empty key; write key=value or key.key=value")
            elif len(path) > DEPTH:
                self.problems.add(COMMAND, path[:4], f"nested deeper than {DEPTH} levels")
            else:
                root = self.put(root, path, (), self.value(text.strip(), path), FieldSlot(cls))
        return root

    def apply_keywords(self, root: YamlNode, cls: type, values: Mapping[str, Any], parents: Path = ()) -> YamlNode:
        """Apply the values of a section. A mapping changes the keys that it has; the others keep their values."""
        for key, value in sorted(values.items(), key=lambda item: item[0] != "kind"):  # the kind decides about the keys
            path = (*parents, *str(key).split("."))
            if not isinstance(key, str) or not all(path):
                self.problems.add(self.at, parents, f"keys are text, with a name between two dots, got {key!r}")
            elif len(path) > DEPTH:
                self.problems.add(self.at, path[:4], f"nested deeper than {DEPTH} levels")
            elif isinstance(value, Mapping) and self.is_section(root, FieldSlot(cls), path, value):
                root = self.apply_keywords(root, cls, value, path)
            else:
                root = self.put(root, path, (), to_node(value, self.at, self.problems, path), FieldSlot(cls))
        return root

    def is_section(self, node: YamlNode | None, slot: FieldSlot | None, path: Path, value: Mapping[str, Any]) -> bool:
        """Whether a mapping has values of config keys: it is neither a table, nor empty, nor unknown."""
        for part in path:
            node, slot = self.enter_single(node, slot, part)
            slot = self.slot_of(slot, node or YamlNode({}), part)
            node = get_child(node, part) if node else None
        if slot is None or not value or (node is not None and isinstance(node.value, list) and len(node.value) != 1):
            return False
        kinds = self.choices.kinds(self.choices.single(slot) or slot)
        return bool(kinds) and ("kind" in value or generic_args(slot.hint, dict) is None)

    def value(self, text: str, path: Path) -> YamlNode:
        if not text.startswith(_QUOTED):
            return YamlNode(parse_scalar(text), COMMAND, text)
        yaml_problems = ErrorCollector()
        node = parse_yaml(text, lambda line: COMMAND, yaml_problems)
        for line in yaml_problems.lines:
            message = line.partition(": ")[2]
            self.problems.add(COMMAND, path, f"{message} in {text!r}; quote text that is not YAML")
        return node

    def put(
        self, node: YamlNode | None, rest: Path, parents: Path, new_node: YamlNode, slot: FieldSlot | None
    ) -> YamlNode:
        """Return `node` with `new_node` at the path `rest` below it. Unknown keys (without a slot) are added too."""
        if not rest:
            return self.assign(node, new_node, slot)
        key, rest = rest[0], rest[1:]
        node, slot = self.enter_single(node, slot, key)
        node = self.as_container(node, slot)
        if isinstance(node.value, list):
            return self.put_item(node, (key, *rest), parents, new_node, slot)
        if key == "kind" and not rest and slot and self.choices.kinds(slot):
            return self.replace_kind(node, new_node, slot)
        child = self.put(node.value.get(key), rest, (*parents, key), new_node, self.slot_of(slot, node, key))
        return replace(node, value={**node.value, key: child})

    def enter_single(
        self, node: YamlNode | None, slot: FieldSlot | None, key: str
    ) -> tuple[YamlNode | None, FieldSlot | None]:
        """Enter the only element of a list if `key` is not an index: a key of a single element needs no index."""
        single = self.choices.single(slot) if slot and not key.isdecimal() else None
        if single is None:
            return node, slot
        if node is None:
            return None, slot if single.default is REQUIRED else single
        if isinstance(node.value, list):
            return (node.value[0], single) if len(node.value) == 1 else (node, slot)
        return node, single

    def put_item(self, node: YamlNode, rest: Path, parents: Path, new: YamlNode, slot: FieldSlot | None) -> YamlNode:
        key, items = rest[0], node.value
        if not key.isdecimal() or int(key) > len(items):
            message = f"is a list of {len(items)}; write {'.'.join((*parents, '0'))}=... for its first element"
            self.problems.add(self.at, (*parents, key), f"{'.'.join(parents)} {message}")
            return node
        index = int(key)
        arguments = generic_args(slot.hint, tuple) if slot else None
        element = FieldSlot(element_type(arguments, index)) if arguments else None
        old = items[index] if index < len(items) else None
        item = self.put(old, rest[1:], (*parents, key), new, element)
        return replace(node, value=[*items[:index], item, *items[index + 1 :]])

    def assign(self, node: YamlNode | None, new: YamlNode, slot: FieldSlot | None) -> YamlNode:
        """Replace `node`. A bare kind keeps the keys of `node` if it has the same kind."""
        slot = (self.choices.single(slot) or slot) if slot else None
        bare = isinstance(new.value, str) and slot and str not in union_members(slot.hint) and self.choices.kinds(slot)
        if bare and slot and node and isinstance(node.value, dict):
            return self.replace_kind(node, replace(new, bare=True), slot)
        return new

    def replace_kind(self, node: YamlNode, kind: YamlNode, slot: FieldSlot) -> YamlNode:
        """Change the kind and drop the keys that only the old kind has. Overrides are kept, and are validated later."""
        old = self.choices.kind_of_node(slot, node)
        is_same_kind, shared_keys = old == kind.value, self.choices.keys_to_keep(slot, old, kind.value)
        entries = {
            key: child for key, child in node.value.items() if is_same_kind or key in shared_keys or child.at == self.at
        }
        slots = [self.choices.kind_slots(slot, name) for name in (old, kind.value)]
        for key in slots[0].keys() & slots[1].keys() & entries.keys():
            removed = mapping_slots(slots[0][key]).keys() - mapping_slots(slots[1][key])
            entries[key] = drop_keys(entries[key], removed)
        return replace(node, value={**entries, "kind": kind})

    def as_container(self, node: YamlNode | None, slot: FieldSlot | None) -> YamlNode:
        """Convert `node` to a mapping or list. A bare word becomes `kind`; a missing list becomes its default."""
        if node and (isinstance(node.value, dict | list) or node.value is FAILED):
            return node if node.value is not FAILED else YamlNode({}, self.at)
        if slot is None:
            return YamlNode({}, self.at)
        if node and isinstance(node.value, str) and self.choices.kinds(slot) and str not in union_members(slot.hint):
            return YamlNode({"kind": replace(node, bare=True)}, node.at)
        if arguments := generic_args(slot.hint, tuple):
            default = () if node or slot.default is REQUIRED or slot.default is None else slot.default
            items = [to_plain_value(item, element_type(arguments, i)) for i, item in enumerate(default)]
            return to_node(items, self.at, self.problems)
        return YamlNode({}, self.at)

    def slot_of(self, slot: FieldSlot | None, node: YamlNode, key: str) -> FieldSlot | None:
        if slot is None:
            return None
        if self.choices.kinds(slot):
            return self.choices.kind_slots(slot, self.choices.kind_of_node(slot, node)).get(key)
        arguments = generic_args(slot.hint, dict)
        return FieldSlot(arguments[1]) if arguments else None


def drop_keys(node: YamlNode, keys: Set[str]) -> YamlNode:
    """Mapping without some keys that are not overrides. Any other node is returned unchanged."""
    if not isinstance(node.value, dict):
        return node
    return replace(
        node, value={key: child for key, child in node.value.items() if key not in keys or child.at == COMMAND}
    )
