"""The dataclasses of a recipe as JSON Schema for editors and as a reference for people."""

import json
from typing import Any, Literal, get_args, get_origin

from tunekit.config.choices import (
    REQUIRED,
    ChoiceRegistry,
    FieldSlot,
    field_slots,
    iter_slots,
    kind_name,
    union_members,
)
from tunekit.config.dump import to_plain_value
from tunekit.config.field_comments import class_comment, field_comments
from tunekit.config.scalar import WORDS

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_REFERENCE = {"type": "string", "pattern": r"\$\{"}  # ${out} may stand for anything
_RECIPE = {"type": "string", "description": "the recipe that this config is written for"}


def json_schema(cls: type) -> dict[str, Any]:
    """JSON Schema 2020-12 of a recipe's config."""
    schema = _Schema()
    top = schema.object(cls)
    top["properties"] = {"recipe": _RECIPE, **top["properties"]}
    top["required"] = _required(field_slots(cls))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, **top, "$defs": {schema.names[cls]: text for cls, text in schema.definitions.items()}}


class _Schema:
    """Every choice is written once, under `$defs`; what it requires depends on where it is used."""

    def __init__(self) -> None:
        self.definitions: dict[type, dict[str, Any]] = {}
        self.names: dict[type, str] = {}

    def object(self, cls: type) -> dict[str, Any]:
        meanings, properties = field_comments(cls), {}
        for name, slot in field_slots(cls).items():
            default = {} if slot.default is REQUIRED else {"default": to_plain_value(slot.default, slot.hint)}
            meaning = {"description": meanings[name]} if name in meanings else {}
            properties[name] = {**self.value(slot), **default, **meaning}
        doc = {"description": class_comment(cls)} if class_comment(cls) else {}
        return {"title": cls.__name__, **doc, "type": "object", "properties": properties, "additionalProperties": False}

    def value(self, slot: FieldSlot) -> dict[str, Any]:
        single = ChoiceRegistry().single(slot)
        options = [*self.kinds(slot), *(self.kinds(single) if single else [])]
        for member in union_members(slot.hint):
            if get_origin(member) is Literal:
                options.append({"enum": [*get_args(member)]})
            elif get_origin(member) is tuple:
                options.append(self.array(get_args(member)))
            elif get_origin(member) is dict:
                options.append({"type": "object", "additionalProperties": self.value(FieldSlot(get_args(member)[1]))})
            elif member in _TYPES:
                options.append({"type": _TYPES[member]})
        if {"type": "string"} not in options:
            options.append(_REFERENCE)
        return options[0] if len(options) == 1 else {"anyOf": options}

    def array(self, items: tuple[Any, ...]) -> dict[str, Any]:
        if items[-1] is Ellipsis:
            return {"type": "array", "items": self.value(FieldSlot(items[0]))}
        each = [self.value(FieldSlot(item)) for item in items]
        return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}

    def kinds(self, slot: FieldSlot) -> list[dict[str, Any]]:
        """The choices of a slot: as a mapping, and as a bare word where nothing else is required."""
        choices = ChoiceRegistry()
        usual, words, found = choices.default_kind(slot), [], []
        for kind, cls in choices.kinds(slot).items():
            required = _required(choices.inside(slot, kind))
            words += [] if required else [kind]
            found.append({"$ref": self.define(cls), "required": [*([] if kind == usual else ["kind"]), *required]})
        return [*found, {"enum": words}] if words else found

    def define(self, cls: type) -> str:
        if cls not in self.names:
            taken = cls.__name__ in self.names.values()
            self.names[cls] = f"{cls.__module__}.{cls.__name__}" if taken else cls.__name__
            text = self.object(cls)
            kind = {"const": kind_name(cls)}
            self.definitions[cls] = {**text, "properties": {"kind": kind, **text["properties"]}}
        return f"#/$defs/{self.names[cls]}"


def _required(keys: dict[str, FieldSlot]) -> list[str]:
    return [name for name, slot in keys.items() if slot.default is REQUIRED]


def options_markdown(cls: type) -> str:
    """All options of a recipe in Markdown: a table for the recipe and one for each choice."""
    used: dict[type, list[str]] = {}
    for path, slot in iter_slots(cls, ChoiceRegistry()):
        kinds = ChoiceRegistry().kinds(slot)
        place = ".".join(part for part in path if part != "0")
        for kind, choice in kinds.items():
            used.setdefault(choice, []).append(f"`{place}: {kind}`" if len(kinds) > 1 else f"`{place}`")
    parts = [_section(f"# {cls.__name__}", cls)]
    parts += [_section(f"## {', '.join(dict.fromkeys(places))}", choice) for choice, places in used.items()]
    return "\n".join(parts)


def _section(title: str, cls: type) -> str:
    meanings, doc = field_comments(cls), class_comment(cls)
    lines = [title, "", *([doc, ""] if doc else [])]
    rows = [
        (f"`{name}`", _words(slot.hint), _default(slot), meanings.get(name, ""))
        for name, slot in field_slots(cls).items()
    ]
    if not rows:
        return "\n".join([*lines, "No options.", ""])
    table = [("key", "type", "default", "what it means"), ("---",) * 4, *rows]
    cells = [[cell.replace("|", "&#124;") for cell in row] for row in table]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells), ""])


def _words(hint: Any) -> str:
    """A type in the words of a config."""
    words = [f"`{kind}`" for kind in ChoiceRegistry().kinds(FieldSlot(hint))]
    for member in union_members(hint):
        if get_origin(member) is Literal:
            words += [f"`{json.dumps(value)}`" for value in get_args(member)]
        elif get_origin(member) is tuple:
            inner = [_words(item) for item in get_args(member) if item is not Ellipsis]
            words.append(f"list of {', '.join(inner)}")
        elif get_origin(member) is dict:
            words.append(f"mapping to {_words(get_args(member)[1])}")
        elif member in WORDS:
            words.append(WORDS[member])
    return " or ".join(words)


def _default(slot: FieldSlot) -> str:
    if slot.default is REQUIRED:
        return "**required**"
    kinds = {cls: kind for kind, cls in ChoiceRegistry().kinds(slot).items()}
    if type(slot.default) not in kinds:
        return f"`{json.dumps(to_plain_value(slot.default, slot.hint), ensure_ascii=False)}`"
    cls = type(slot.default)
    usual, here = field_slots(cls), field_slots(cls, slot.default)
    own = [
        f"{name}={json.dumps(to_plain_value(here[name].default, here[name].hint))}"
        for name in here
        if here[name].default != usual[name].default
    ]
    return f"`{kinds[cls]}`" + (f" with `{', '.join(own)}`" if own else "")
