"""Build dataclasses from a tree of YAML nodes and collect all errors."""

import re
from dataclasses import replace
from pathlib import Path as FilePath
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
from tunekit.config.migration_hints import VALUE_NOTES
from tunekit.config.node import COMMAND, FAILED, YamlNode
from tunekit.config.scalar import TYPE_LABELS, parse_number
from tunekit.config.suggestions import (
    join_with_or,
    key_for_value,
    unknown_key_message,
    unknown_kind_message,
)
from tunekit.config.yaml_parser import format_value
from tunekit.errors import FieldError, UserError, closest_match

PATH_KEY = re.compile(r"\w+_(dir|path)|source|model|tokenizer|baseline|json_schema|chat_template")
ENVIRONMENT_VARIABLE = re.compile(r"\$[A-Z_][A-Z0-9_]*")

DEVICE_VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}  # variables that select one of several GPUs
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}  # of torch


class ConfigBuilder:
    """Builds instances of the dataclasses below `root`. Returns `FAILED` after an error, which is in `problems`."""

    def __init__(self, root: type, choices: ChoiceRegistry, problems: ErrorCollector) -> None:
        self.root, self.choices, self.problems = root, choices, problems

    def value(self, slot: FieldSlot, node: YamlNode, path: Path) -> Any:
        if node.value is FAILED:
            return FAILED
        matches, value = _scalar(union_members(slot.hint), node)
        if matches:
            return value
        arguments = generic_args(slot.hint, tuple)
        if isinstance(node.value, list) and arguments:
            return self.items(arguments, node, path)
        single = self.choices.single(slot)
        if single and isinstance(node.value, str | dict) and node.value != "none":
            item = self.value(single, node, path)
            return FAILED if item is FAILED else (item,)
        kinds, table = self.choices.kinds(slot), generic_args(slot.hint, dict)
        if isinstance(node.value, dict) and table and not ("kind" in node.value and kinds):
            return self.table(table[1], node, path)
        if isinstance(node.value, dict) and kinds:
            return self.choice(slot, node.value, node, path)
        if isinstance(node.value, str) and (len(kinds) > 1 or node.value in kinds):
            return self.choice(slot, {"kind": replace(node, bare=True)}, node, path)
        got = f", got {format_value(node.value)}"
        self.problems.add(
            node.at, path, f"expected {self.expected(slot)}{got}{_type_hint(slot, node) or _value_note(path)}"
        )
        return FAILED

    def expected(self, slot: FieldSlot) -> str:
        """Description of the values that a slot accepts."""
        kinds = self.choices.kinds(slot)
        descriptions = [join_with_or(kinds)] if len(kinds) > 1 else [f"keys of {kind}" for kind in kinds]
        for option in union_members(slot.hint):
            if get_origin(option) is Literal:
                descriptions.append("one of " + ", ".join(format_value(value) for value in get_args(option)))
            elif get_origin(option) is tuple:
                first, *others = get_args(option)
                size = "" if Ellipsis in others else f"{1 + len(others)} elements, each "
                descriptions.append(f"a list of {size}{self.expected(FieldSlot(first))}")
            elif get_origin(option) is dict:
                descriptions.append("a mapping")
            elif option in TYPE_LABELS:
                descriptions.append({int: "an integer", float: "a number"}.get(option, TYPE_LABELS[option]))
        return " or ".join(descriptions)

    def items(self, arguments: tuple[Any, ...], node: YamlNode, path: Path) -> Any:
        if arguments[-1] is not Ellipsis and len(arguments) != len(node.value):
            got = f"got {len(node.value)}"
            self.problems.add(node.at, path, f"expected a list of {len(arguments)} elements, {got}")
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
        """Build the member of a union that `kind` names, or the default member."""
        entries = self.expand_reference(slot, entries)
        kinds, kind_node = self.choices.kinds(slot), entries.get("kind")
        kind = self.choices.default_kind(slot) if kind_node is None else kind_node.value
        if kind is FAILED:
            return FAILED
        if kind is None and kind_node is None:
            self.problems.add(node.at, path, f"missing kind; write `kind:` with one of {', '.join(kinds)}")
            return FAILED
        if not isinstance(kind, str) or kind not in kinds:
            error_path = path if kind_node and kind_node.bare else (*path, "kind")
            kind_text = kind if isinstance(kind, str) else format_value(kind)
            hint = (
                self.value_hint(slot, kind, kind_node, path)
                if kind_node and kind_node.bare and isinstance(kind, str)
                else ""
            )
            self.problems.add(
                kind_node.at if kind_node else node.at, error_path, unknown_kind_message(kind_text, kinds) + hint
            )
            return FAILED
        keys = {key: child for key, child in entries.items() if key != "kind"}
        cls = kinds[kind]
        base = slot.default if type(slot.default) is cls else None
        return self.make(cls, base, kinds, (YamlNode(keys, node.at), path))

    def expand_reference(self, slot: FieldSlot, entries: dict[str, YamlNode]) -> dict[str, YamlNode]:
        """Keys of a choice, with `FILE.py:name` as the value of a kind with code of the user."""
        node = entries.get("kind")
        code = self.choices.code_kind(slot, node.value) if node and node.bare and isinstance(node.value, str) else None
        if node is None or code is None:
            return entries
        kind, key = code
        return {**entries, "kind": replace(node, value=kind, text=kind), key: node}

    def value_hint(self, slot: FieldSlot, word: str, node: YamlNode, path: Path) -> str:
        """Suggestion for a word that is not a kind but may be the value of the required key of the default kind."""
        key = key_for_value(word, self.choices.default_kind(slot), self.choices.kinds(slot))
        if key is None:
            return ""
        replacement = f"{'.'.join((*path, key))}={word}" if node.at == COMMAND else f"{path[-1]}: {{{key}: {word}}}"
        return f"; for the {key} '{word}', write {replacement}"

    def make(self, cls: type, base: Any, kinds: dict[str, type], location: tuple[YamlNode, Path]) -> Any:
        """Build `cls` from the keys in the config; `base` has the values of the other keys."""
        node, path = location
        slots, values = field_slots(cls, base), {}
        for key, child in node.value.items():
            if key in slots:
                values[key] = self.expand_path(self.value(slots[key], child, (*path, key)), child, (*path, key))
            else:
                message = unknown_key_message(self.root, (*path, key), cls, kinds, self.choices, node)
                self.problems.add(child.at, (*path, key), message)
                values[key] = FAILED
        for name, slot in slots.items():
            if name not in node.value and slot.default is REQUIRED:
                self.problems.add(node.at, (*path, name), "is required, but missing")
                values[name] = FAILED
            elif name not in node.value and base is not None:
                values[name] = slot.default
        return (
            FAILED if any(value is FAILED for value in values.values()) else self.instantiate(cls, values, node, path)
        )

    def expand_path(self, value: Any, node: YamlNode, path: Path) -> Any:
        """Value of a key. Of paths, `~` is expanded; environment variables, which a shell would expand, are errors."""
        if not isinstance(value, str) or not PATH_KEY.fullmatch(path[-1]):
            return value
        if variable := ENVIRONMENT_VARIABLE.search(value):
            problem = f"{variable[0]} is not expanded, got {format_value(value)}"
            message = f"{problem}. Write the path, or ~ for the home directory"
            self.problems.add(node.at, path, message)
            return FAILED
        is_home = value == "~" or value.startswith("~/")
        return str(FilePath(value).expanduser()) if is_home else value

    def instantiate(self, cls: type, values: dict[str, Any], node: YamlNode, path: Path) -> Any:
        """Call `cls`. Its `__post_init__` may reject values that have the right type."""
        try:
            return cls(**values)
        except FieldError as error:
            for field_error in error.errors if isinstance(error, FieldErrors) else (error,):
                field_path = tuple(field_error.field.split("."))
                self.problems.add(node.find(field_path).at, (*path, *field_path), field_error.message)
        except (ValueError, UserError) as error:
            self.problems.add(node.at, path, str(error) or f"invalid values for {kind_name(cls)}")
        return FAILED


def _scalar(options: tuple[Any, ...], node: YamlNode) -> tuple[bool, Any]:
    """Convert a scalar to one of the types: (success, value). An exact match takes precedence over a conversion."""
    value = node.value
    is_nan = value != value
    if (value == "None" and node.text and type(None) in options) or exceeds_int64(value) or is_nan:
        return False, None
    literals = [item for option in options if get_origin(option) is Literal for item in get_args(option)]
    if type(value) in options or any(type(value) is type(item) and value == item for item in literals):
        return True, value
    typed = parse_number(value) if isinstance(value, str) else value  # other YAML parsers read 2e-4 as text
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


def exceeds_int64(value: Any) -> bool:
    """Whether an integer does not fit into 64 bits."""
    return type(value) is int and not -(2**63) <= value < 2**63


def _device_hint(options: tuple[Any, ...], value: str) -> str:
    """Hint for `device: cuda:1`: select a GPU with an environment variable, before the process starts."""
    kind, _, index = value.partition(":")
    choices = [item for option in options if get_origin(option) is Literal for item in get_args(option)]
    if kind not in DEVICE_VARIABLES or kind not in choices or not index.isdecimal():
        return ""
    return f"; write {kind}, and select the device with the environment variable {DEVICE_VARIABLES[kind]}={index}"


def _closest_literal(options: tuple[Any, ...], value: str) -> str | None:
    """The word that `value` resembles, or that is tunekit's name of a dtype of torch."""
    words = [item for option in options if get_origin(option) is Literal for item in get_args(option)]
    words = [word for word in words if isinstance(word, str)]
    renamed = DTYPE_NAMES.get(value.removeprefix("torch."))
    return renamed if renamed in words else closest_match(value, words)


def _type_hint(slot: FieldSlot, node: YamlNode) -> str:
    value = node.value
    if exceeds_int64(value):
        return "; the maximum is 9223372036854775807"
    options = union_members(slot.hint)
    if value == "None" and type(None) in options:
        return "; write null"
    if isinstance(value, str) and ":" not in value and (nearest := _closest_literal(options, value)):
        return f". Did you mean '{nearest}'?"
    if isinstance(value, list) or (generic_args(slot.hint, tuple) and not isinstance(value, dict)):
        return "" if isinstance(value, list) else f"; a list is written {_list_example(slot, value)}"
    if str in options and node.text:
        return f"; put text in quotes: '{node.text}'"
    if bool in options and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        return f"; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if isinstance(value, str) and ":" in value:
        return _device_hint(options, value)
    if int in options and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"; write {int(value)}"
    return ""


def _value_note(path: Path) -> str:
    note = VALUE_NOTES.get(path[-1]) if path else None
    return f"; {note}" if note else ""


def _list_example(slot: FieldSlot, value: object) -> str:
    """How a list is written: with this value, and dots for the other elements of a tuple."""
    if isinstance(value, str) and "," in value:
        return f"[{value.strip('()')}]"
    size = len([hint for hint in generic_args(slot.hint, tuple) or () if hint is not Ellipsis])
    first = ("..." if size > 1 else "") if value in (None, "none") else value
    return f"[{first}{', ...' * (size > 1)}]"
