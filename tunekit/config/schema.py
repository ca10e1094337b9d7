"""JSON Schema for editors and a Markdown reference, generated from the config dataclasses of a recipe."""

import json
from typing import Any, Literal, get_args, get_origin

from tunekit.config.choices import (
    REQUIRED,
    ChoiceRegistry,
    CodeKind,
    FieldSlot,
    field_slots,
    iter_slots,
    kind_name,
    mapping_slots,
    union_members,
)
from tunekit.config.dump import to_plain_value
from tunekit.config.field_comments import class_comment, field_comments
from tunekit.config.scalar import TYPE_LABELS
from tunekit.errors import UserError, did_you_mean

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_REFERENCE = {"type": "string", "pattern": r"\$\{"}  # a reference such as ${output_dir} is valid for any type
_RECIPE = {"type": "string", "description": "recipe of this config"}


def json_schema(cls: type) -> dict[str, Any]:
    """Generate the JSON Schema (2020-12) of a recipe's config."""
    schema = _Schema()
    top = schema.object(cls)
    top["properties"] = {"recipe": _RECIPE, **top["properties"]}
    top["required"] = _required(field_slots(cls))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, **top, "$defs": {schema.names[cls]: text for cls, text in schema.definitions.items()}}


class _Schema:
    """Defines each dataclass once, under `$defs`. Required keys depend on the slot, so they are added to each use."""

    def __init__(self) -> None:
        self.definitions: dict[type, dict[str, Any]] = {}
        self.names: dict[type, str] = {}

    def object(self, cls: type) -> dict[str, Any]:
        comments, properties = field_comments(cls), {}
        for name, slot in field_slots(cls).items():
            default = {} if slot.default is REQUIRED else {"default": to_plain_value(slot.default, slot.hint)}
            description = {"description": comments[name]} if name in comments else {}
            properties[name] = {**self.value(slot), **default, **description}
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
                keys = {key: self.value(inner) for key, inner in mapping_slots(slot).items()}
                others = False if keys else self.value(FieldSlot(get_args(member)[1]))
                properties = {"properties": keys} if keys else {}
                options.append({"type": "object", **properties, "additionalProperties": others})
            elif member in _TYPES:
                options.append({"type": _TYPES[member]})
        if {"type": "string"} not in options:
            options.append(_REFERENCE)
        return options[0] if len(options) == 1 else {"anyOf": options}

    def array(self, items: tuple[Any, ...]) -> dict[str, Any]:
        if items[-1] is Ellipsis:
            return {"type": "array", "items": self.value(FieldSlot(items[0]))}
        item_schemas = [self.value(FieldSlot(item)) for item in items]
        return {"type": "array", "prefixItems": item_schemas, "items": False, "minItems": len(item_schemas)}

    def kinds(self, slot: FieldSlot) -> list[dict[str, Any]]:
        """Schemas of the kinds of a slot: as a mapping, and as a bare word if the kind has no required keys."""
        choices = ChoiceRegistry()
        default_kind, bare_kinds, refs = choices.default_kind(slot), [], []
        for kind, cls in choices.kinds(slot).items():
            required = _required(choices.kind_slots(slot, kind))
            bare_kinds += [] if required else [kind]
            refs.append(
                {"$ref": self.define(cls), "required": [*([] if kind == default_kind else ["kind"]), *required]}
            )
        if any(isinstance(cls, CodeKind) for cls in choices.kinds(slot).values()):
            refs.append({"type": "string", "pattern": r"\.py:[^\W\d]\w*$"})
        return [*refs, {"enum": bare_kinds}] if bare_kinds else refs

    def define(self, cls: type) -> str:
        if cls not in self.names:
            name_exists = cls.__name__ in self.names.values()
            self.names[cls] = f"{cls.__module__}.{cls.__name__}" if name_exists else cls.__name__
            text = self.object(cls)
            kind = {"const": kind_name(cls)}
            self.definitions[cls] = {**text, "properties": {"kind": kind, **text["properties"]}}
        return f"#/$defs/{self.names[cls]}"


def _required(keys: dict[str, FieldSlot]) -> list[str]:
    return [name for name, slot in keys.items() if slot.default is REQUIRED]


def options_markdown(cls: type) -> str:
    """Markdown with all options of a recipe: one table for the recipe and one for each kind."""
    return _sections(cls, {choice: places for choice, (places, _) in _find_uses(cls).items()})


def overview_markdown(cls: type) -> str:
    """Markdown with the keys of a recipe, and those of the kind that each of them has by default.

    If that kind has no options, as `adapter: none`, the first one with options is shown.
    """
    choices, shown = ChoiceRegistry(), set()
    for slot in field_slots(cls).values():
        kinds = [kind for kind in choices.kinds(slot).values() if field_slots(kind)]
        default = [kind for kind in kinds if kind is type(slot.default)]
        shown |= {*(default or kinds)[:1]}
    uses = {choice: places[:1] for choice, (places, depth) in _find_uses(cls).items() if choice in shown and depth == 1}
    return _sections(cls, uses)


def key_markdown(cls: type, key: str) -> str:
    """Markdown with the options of all kinds of a key such as `loss` or `data.transforms`, or of those that have
    an option such as `optimizer.lr`. Raises UserError for an unknown key.
    """
    parent, _, name = key.rpartition(".")
    all_uses = _find_uses(cls)
    for path, option in ((key, None), (parent, name)):
        sections = [
            _section(f"## {', '.join(matching)}", choice)
            for choice, (places, _) in all_uses.items()
            if (matching := [place for place in places if _key_of(place) == path])
            and (option is None or option in field_slots(choice))
        ]
        if sections:
            return "\n".join(sections)
    comments, slots = field_comments(cls), field_slots(cls)
    if key in slots:
        return f"`{key}`: {_type_label(slots[key].hint)}, default {_default(slots[key])}. {comments.get(key, '')}\n"
    keys = sorted({_key_of(place) for places, _ in all_uses.values() for place in places})
    raise UserError(f"{key}: unknown key.{did_you_mean(key, [*slots, *keys])}")


def _key_of(place: str) -> str:
    """Key of a title such as `optimizer: adamw`."""
    return place.strip("`").partition(": ")[0]


def _find_uses(cls: type) -> dict[type, tuple[list[str], int]]:
    """Each kind of a recipe's config with the keys that accept it, as Markdown, and the depth of the first of them."""
    uses: dict[type, tuple[list[str], int]] = {}
    for path, slot in iter_slots(cls, ChoiceRegistry()):
        kinds = ChoiceRegistry().kinds(slot)
        parts = [part for part in path if part != "0"]
        for kind, choice in kinds.items():
            place = f"`{'.'.join(parts)}: {kind}`" if len(kinds) > 1 else f"`{'.'.join(parts)}`"
            uses.setdefault(choice, ([], len(parts)))[0].append(place)
    return uses


def _sections(cls: type, uses: dict[type, list[str]]) -> str:
    sections = [_section(f"# {cls.__name__}", cls)]
    sections += [_section(f"## {', '.join(dict.fromkeys(places))}", choice) for choice, places in uses.items()]
    return "\n".join(sections)


def _section(title: str, cls: type) -> str:
    comments, doc = field_comments(cls), class_comment(cls)
    lines = [title, "", *([doc, ""] if doc else [])]
    rows = [
        (f"`{name}`", _type_label(slot.hint), _default(slot), comments.get(name, ""))
        for name, slot in field_slots(cls).items()
    ]
    if not rows:
        return "\n".join([*lines, "No options.", ""])
    table = [("key", "type", "default", "meaning"), ("---",) * 4, *rows]
    cells = [[cell.replace("|", "&#124;") for cell in row] for row in table]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells), ""])


def _type_label(hint: Any) -> str:
    """Label of a type for users."""
    labels = [f"`{kind}`" for kind in ChoiceRegistry().kinds(FieldSlot(hint))]
    for member in union_members(hint):
        if get_origin(member) is Literal:
            labels += [f"`{json.dumps(value)}`" for value in get_args(member)]
        elif get_origin(member) is tuple:
            items = [_type_label(item) for item in get_args(member) if item is not Ellipsis]
            labels.append(f"list of {', '.join(items)}")
        elif get_origin(member) is dict:
            values = _type_label(get_args(member)[1])
            labels.append("mapping" if " or " in values else f"mapping to {values}")
        elif member in TYPE_LABELS:
            labels.append(TYPE_LABELS[member])
    return " or ".join(labels)


def _default(slot: FieldSlot) -> str:
    if slot.default is REQUIRED:
        return "**required**"
    kinds = {cls: kind for kind, cls in ChoiceRegistry().kinds(slot).items()}
    if type(slot.default) not in kinds:
        return f"`{json.dumps(to_plain_value(slot.default, slot.hint), ensure_ascii=False)}`"
    cls = type(slot.default)
    defaults, slots = field_slots(cls), field_slots(cls, slot.default)
    changes = [
        f"{name}={json.dumps(to_plain_value(slots[name].default, slots[name].hint))}"
        for name in slots
        if slots[name].default != defaults[name].default
    ]
    return f"`{kinds[cls]}`" + (f" with `{', '.join(changes)}`" if changes else "")
