"""The tree of nodes becomes dataclasses, and every mistake in it is told."""

from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from tunekit.config.choices import (
    REQUIRED,
    ChoiceRegistry,
    FieldSlot,
    element_type,
    field_slots,
    generic_args,
    kind_name,
    union_members,
)
from tunekit.config.errors import ErrorCollector, FieldErrors, Path
from tunekit.config.node import COMMAND, FAILED, YamlNode
from tunekit.config.scalar import WORDS, parse_number
from tunekit.config.suggestions import join_with_or, key_for_value, unknown_key_message, unknown_kind_message
from tunekit.config.yaml_parser import format_value
from tunekit.errors import FieldError, UserError

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}  # variables that select one of several GPUs


class ConfigBuilder:
    """Builds an instance of `root` or `FAILED`, in which case `problems` says why."""

    def __init__(self, root: type, choices: ChoiceRegistry, problems: ErrorCollector) -> None:
        self.root, self.choices, self.problems = root, choices, problems

    def value(self, slot: FieldSlot, node: YamlNode, path: Path) -> Any:
        if node.value is FAILED:
            return FAILED
        found, value = _scalar(union_members(slot.hint), node)
        if found:
            return value
        arguments = generic_args(slot.hint, tuple)
        if isinstance(node.value, list) and arguments:
            return self.items(arguments, node, path)
        single = self.choices.single(slot)
        if single and isinstance(node.value, str | dict):
            only = self.value(single, node, path)
            return FAILED if only is FAILED else (only,)
        kinds, table = self.choices.kinds(slot), generic_args(slot.hint, dict)
        if isinstance(node.value, dict) and table and not ("kind" in node.value and kinds):
            return self.table(table[1], node, path)
        if isinstance(node.value, dict) and kinds:
            return self.choice(slot, node.value, node, path)
        if isinstance(node.value, str) and (len(kinds) > 1 or node.value in kinds):
            return self.choice(slot, {"kind": replace(node, bare=True)}, node, path)
        return self.wrong(slot, node, path)

    def wrong(self, slot: FieldSlot, node: YamlNode, path: Path) -> Any:
        got = f", got {format_value(node.value)}"
        self.problems.add(node.at, path, f"expected {self.expected(slot)}{got}{_hint(slot, node)}")
        return FAILED

    def expected(self, slot: FieldSlot) -> str:
        """What may stand in a slot, in words."""
        kinds = self.choices.kinds(slot)
        words = [join_with_or(kinds)] if len(kinds) > 1 else [f"keys of {kind}" for kind in kinds]
        for option in union_members(slot.hint):
            if get_origin(option) is Literal:
                words.append("one of " + ", ".join(format_value(value) for value in get_args(option)))
            elif get_origin(option) is tuple:
                words.append(f"a list of {self.expected(FieldSlot(get_args(option)[0]))}")
            elif get_origin(option) is dict:
                words.append("a mapping")
            elif option in WORDS:
                words.append(f"a {WORDS[option]}" if option in (int, float) else WORDS[option])
        return " or ".join(words)

    def items(self, arguments: tuple[Any, ...], node: YamlNode, path: Path) -> Any:
        if arguments[-1] is not Ellipsis and len(arguments) != len(node.value):
            self.problems.add(node.at, path, f"expected a list of {len(arguments)}, got {len(node.value)} elements")
            return FAILED
        built = [
            self.value(FieldSlot(element_type(arguments, i)), item, (*path, str(i)))
            for i, item in enumerate(node.value)
        ]
        return FAILED if any(item is FAILED for item in built) else tuple(built)

    def table(self, hint: Any, node: YamlNode, path: Path) -> Any:
        built = {key: self.value(FieldSlot(hint), child, (*path, key)) for key, child in node.value.items()}
        return FAILED if any(child is FAILED for child in built.values()) else built

    def choice(self, slot: FieldSlot, entries: dict[str, YamlNode], node: YamlNode, path: Path) -> Any:
        """The member of a union that is named by `kind`, or the default one."""
        kinds, named = self.choices.kinds(slot), entries.get("kind")
        kind = self.choices.default_kind(slot) if named is None else named.value
        if kind is FAILED:
            return FAILED
        if kind is None and named is None:
            self.problems.add(node.at, path, f"no kind is given; write `kind:` with one of {', '.join(kinds)}")
            return FAILED
        if not isinstance(kind, str) or kind not in kinds:
            at = path if named and named.bare else (*path, "kind")
            word = kind if isinstance(kind, str) else format_value(kind)
            hint = self.word_hint(slot, kind, named, path) if named and named.bare and isinstance(kind, str) else ""
            self.problems.add(named.at if named else node.at, at, unknown_kind_message(word, kinds) + hint)
            return FAILED
        keys = {key: child for key, child in entries.items() if key != "kind"}
        cls = kinds[kind]
        base = slot.default if type(slot.default) is cls else None
        return self.make(cls, base, kinds, (YamlNode(keys, node.at), path))

    def word_hint(self, slot: FieldSlot, word: str, node: YamlNode, path: Path) -> str:
        """How to write a word that names no kind, but may be what the usual one is to be told."""
        key = key_for_value(word, self.choices.default_kind(slot), self.choices.kinds(slot))
        if key is None:
            return ""
        meant = f"{'.'.join((*path, key))}={word}" if node.at == COMMAND else f"{path[-1]}: {{{key}: {word}}}"
        return f"; for the {key} '{word}', write {meant}"

    def make(self, cls: type, base: Any, kinds: dict[str, type], written: tuple[YamlNode, Path]) -> Any:
        """An instance of `cls` from what is written; `base` has the values of the keys that are not."""
        node, path = written
        places, values = field_slots(cls, base), {}
        for key, child in node.value.items():
            if key in places:
                values[key] = self.value(places[key], child, (*path, key))
            else:
                message = unknown_key_message(self.root, (*path, key), cls, kinds, self.choices, node)
                self.problems.add(child.at, (*path, key), message)
                values[key] = FAILED
        for name, slot in places.items():
            if name not in node.value and slot.default is REQUIRED:
                self.problems.add(node.at, (*path, name), "is required, but missing")
                values[name] = FAILED
            elif name not in node.value and base is not None:
                values[name] = slot.default
        return FAILED if any(value is FAILED for value in values.values()) else self.called(cls, values, node, path)

    def called(self, cls: type, values: dict[str, Any], node: YamlNode, path: Path) -> Any:
        """The class may refuse values that have the right type."""
        try:
            return cls(**values)
        except FieldError as error:
            for one in error.errors if isinstance(error, FieldErrors) else (error,):
                inner = tuple(one.field.split("."))
                self.problems.add(node.find(inner).at, (*path, *inner), one.message)
        except (ValueError, UserError) as error:
            self.problems.add(node.at, path, str(error) or f"{kind_name(cls)} refuses these values")
        return FAILED


def _scalar(options: tuple[Any, ...], node: YamlNode) -> tuple[bool, Any]:
    """Whether one of the options takes the scalar, and as what. A type that fits exactly comes first."""
    value = node.value
    if (value == "None" and node.text and type(None) in options) or too_large(value):
        return False, None
    literals = [item for option in options if get_origin(option) is Literal for item in get_args(option)]
    if type(value) in options or any(type(value) is type(item) and value == item for item in literals):
        return True, value
    typed = parse_number(value) if isinstance(value, str) else value  # other YAML readers take 2e-4 for text
    if float in options and type(typed) in (int, float):
        return True, float(typed)
    if node.at == COMMAND:
        if int in options and type(typed) is int:
            return True, typed
        if node.text in literals or (
            str in options and node.text is not None and (node.text == "" or value is not None)
        ):
            return True, node.text
    return False, None


def too_large(value: Any) -> bool:
    """Whether a whole number does not fit into the 64 bits that it has everywhere else."""
    return type(value) is int and not -(2**63) <= value < 2**63


def _device_hint(options: tuple[Any, ...], value: str) -> str:
    """How to select one of several GPUs, for `device: cuda:1`: by the environment, before the process starts."""
    kind, _, index = value.partition(":")
    choices = [item for option in options if get_origin(option) is Literal for item in get_args(option)]
    if kind not in VISIBLE or kind not in choices or not index.isdecimal():
        return ""
    return f"; write {kind}, and select the device with the environment variable {VISIBLE[kind]}={index}"


def _hint(slot: FieldSlot, node: YamlNode) -> str:
    value = node.value
    if too_large(value):
        return "; the largest is 9223372036854775807"
    options = union_members(slot.hint)
    if value == "None" and type(None) in options:
        return "; write null for nothing"
    if isinstance(value, list) or (generic_args(slot.hint, tuple) and not isinstance(value, dict)):
        return "" if isinstance(value, list) else f"; a list is written [{value}]"
    if str in options and node.text:
        return f"; put text in quotes: '{node.text}'"
    if bool in options and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        return f"; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if isinstance(value, str) and ":" in value:
        return _device_hint(options, value)
    if int in options and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"; write {int(value)}"
    return ""
