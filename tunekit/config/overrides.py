"""`key=value` from the command line, written into the tree before anything is built."""

from collections.abc import Sequence
from dataclasses import replace

from tunekit.config.choices import REQUIRED, ChoiceRegistry, FieldSlot, element_type, generic_args, union_members
from tunekit.config.dump import to_plain_value
from tunekit.config.errors import ErrorCollector, Path
from tunekit.config.node import COMMAND, DEPTH, FAILED, YamlNode, to_node
from tunekit.config.scalar import parse_scalar
from tunekit.config.yaml_parser import parse_yaml

_QUOTED = ("[", "{", '"', "'")  # a value that begins so is YAML; all else is one word, whatever is in it


class Overrides:
    """Writes overrides into a tree. The schema tells which kind a change starts from."""

    def __init__(self, choices: ChoiceRegistry, problems: ErrorCollector) -> None:
        self.choices, self.problems = choices, problems

    def apply(self, root: YamlNode, cls: type, items: Sequence[str]) -> YamlNode:
        """The tree with the items written into it, the last one winning."""
        for item in items:
            key, equals, text = item.partition("=")
            path = tuple(part.strip() for part in key.split("."))
            if item.startswith("-"):
                self.problems.add(COMMAND, (), f"'{item}' is no option here; values are set by key=value")
            elif not equals:
                self.problems.add(COMMAND, (), f"'{item}' has no '='; write key=value")
            elif not all(path):
                self.problems.add(COMMAND, (), f"'{item}' has an empty key; write key=value or key.key=value")
            elif len(path) > DEPTH:
                self.problems.add(COMMAND, path[:4], f"nested deeper than {DEPTH} levels")
            else:
                root = self.put(root, path, (), self.value(text.strip(), path), FieldSlot(cls))
        return root

    def value(self, text: str, path: Path) -> YamlNode:
        if not text.startswith(_QUOTED):
            return YamlNode(parse_scalar(text), COMMAND, text)
        found = ErrorCollector()
        node = parse_yaml(text, lambda line: COMMAND, found)
        for line in found.lines:
            said = line.partition(": ")[2]
            self.problems.add(COMMAND, path, f"{said} in {text!r}; put text that is no YAML in quotes")
        return node

    def put(self, node: YamlNode | None, rest: Path, done: Path, new: YamlNode, slot: FieldSlot | None) -> YamlNode:
        """`node` with `new` written at `rest`. Without a slot (an unknown key) the tree is followed all the same."""
        if not rest:
            return self.assigned(node, new, slot)
        key, rest = rest[0], rest[1:]
        node, slot = self.lone(node, slot, key)
        node = self.opened(node, slot)
        if isinstance(node.value, list):
            return self.put_item(node, (key, *rest), done, new, slot)
        if key == "kind" and not rest and slot and self.choices.kinds(slot):
            return self.rekinded(node, new, slot)
        child = self.put(node.value.get(key), rest, (*done, key), new, self.slot_of(slot, node, key))
        return replace(node, value={**node.value, key: child})

    def lone(self, node: YamlNode | None, slot: FieldSlot | None, key: str) -> tuple[YamlNode | None, FieldSlot | None]:
        """A key that is no place in a list of one choice is one of that choice."""
        single = self.choices.single(slot) if slot and not key.isdecimal() else None
        if single is None:
            return node, slot
        if node is None:
            return None, slot if single.default is REQUIRED else single
        if isinstance(node.value, list):
            return (node.value[0], single) if len(node.value) == 1 else (node, slot)
        return node, single

    def put_item(self, node: YamlNode, rest: Path, done: Path, new: YamlNode, slot: FieldSlot | None) -> YamlNode:
        key, items = rest[0], node.value
        if not key.isdecimal() or int(key) > len(items):
            said = f"is a list of {len(items)}; write {'.'.join((*done, '0'))}=... for its first element"
            self.problems.add(COMMAND, (*done, key), f"{'.'.join(done)} {said}")
            return node
        index = int(key)
        arguments = generic_args(slot.hint, tuple) if slot else None
        element = FieldSlot(element_type(arguments, index)) if arguments else None
        old = items[index] if index < len(items) else None
        item = self.put(old, rest[1:], (*done, key), new, element)
        return replace(node, value=[*items[:index], item, *items[index + 1 :]])

    def assigned(self, node: YamlNode | None, new: YamlNode, slot: FieldSlot | None) -> YamlNode:
        """A bare word names a kind: what is written for the same kind stays."""
        slot = (self.choices.single(slot) or slot) if slot else None
        bare = isinstance(new.value, str) and slot and str not in union_members(slot.hint) and self.choices.kinds(slot)
        if bare and slot and node and isinstance(node.value, dict):
            return self.rekinded(node, replace(new, bare=True), slot)
        return new

    def rekinded(self, node: YamlNode, kind: YamlNode, slot: FieldSlot) -> YamlNode:
        """Another kind drops the keys of the old one; those from the command line stay, to be used or complained of."""
        old = self.choices.kind_in(slot, node)
        same, known = old == kind.value, self.choices.kept(slot, old, kind.value)
        kept = {key: child for key, child in node.value.items() if same or key in known or child.at == COMMAND}
        return replace(node, value={**kept, "kind": kind})

    def opened(self, node: YamlNode | None, slot: FieldSlot | None) -> YamlNode:
        """A mapping or a list to write into: a bare word becomes its kind; a default list is written out."""
        if node and (isinstance(node.value, dict | list) or node.value is FAILED):
            return node if node.value is not FAILED else YamlNode({}, COMMAND)
        if slot is None:
            return YamlNode({}, COMMAND)
        if node and isinstance(node.value, str) and self.choices.kinds(slot) and str not in union_members(slot.hint):
            return YamlNode({"kind": replace(node, bare=True)}, node.at)
        if arguments := generic_args(slot.hint, tuple):
            default = () if node or slot.default is REQUIRED or slot.default is None else slot.default
            items = [to_plain_value(item, element_type(arguments, i)) for i, item in enumerate(default)]
            return to_node(items, COMMAND, self.problems)
        return YamlNode({}, COMMAND)

    def slot_of(self, slot: FieldSlot | None, node: YamlNode, key: str) -> FieldSlot | None:
        if slot is None:
            return None
        if self.choices.kinds(slot):
            return self.choices.inside(slot, self.choices.kind_in(slot, node)).get(key)
        arguments = generic_args(slot.hint, dict)
        return FieldSlot(arguments[1]) if arguments else None
