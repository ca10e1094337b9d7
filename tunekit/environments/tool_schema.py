"""JSON schemas of tools, from the type hints and the Google-style docstring of a function."""

import inspect
import json
import re
from collections.abc import Callable
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tunekit.errors import UserError

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
TYPES = {**SCALARS, list: "array", tuple: "array", dict: "object"}
SECTION = re.compile(r"^\s*(Args|Returns|Raises):[ \t]*$|^\s*(Returns|Raises):", re.MULTILINE)
ARGUMENT = re.compile(r"^([ \t]*)(\w+):\s*(.*)$")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Schema of a function or method in OpenAI's format, as `get_json_schema` of transformers returns it.

    Raises UserError without a docstring, or if an argument has no type hint or no description.
    """
    name, doc = function.__name__, inspect.getdoc(function)
    where = f"tool {name}"
    if not doc:
        raise UserError(f"{where}: has no docstring. Describe the tool and its arguments in Google style.")
    sections = split_docstring(doc.strip())
    descriptions = parse_arguments(sections.get("Args", ""))
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is parameter.empty:
            raise UserError(f"{where}: argument {parameter.name!r} has no type hint. Add one, such as `: str`.")
        if parameter.name not in descriptions:
            raise UserError(f"{where}: argument {parameter.name!r} is not described under `Args:` in the docstring.")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        schema = with_where(hints[parameter.name], f"{where}: argument {parameter.name!r}")
        properties[parameter.name] = with_description(schema, descriptions[parameter.name])
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    result = {"name": name, "description": sections[""].strip(), "parameters": parameters}
    if "return" in hints and (returned := return_schema(hints["return"])) is not None:
        text = sections.get("Returns", "").strip()
        result["return"] = {**returned, **({"description": text} if text else {})}
    return {"type": "function", "function": result}


def with_where(hint: Any, where: str) -> dict[str, Any]:
    try:
        return type_schema(hint)
    except TypeError as error:
        raise UserError(f"{where}: {error}. Use str, int, float, bool, list, dict, Literal or Enum.") from None


def return_schema(hint: Any) -> dict[str, Any] | None:
    """Schema of the returned value; None for types without one: models only read the result."""
    try:
        return type_schema(hint)
    except TypeError:
        return None


def type_schema(hint: Any) -> dict[str, Any]:
    """Schema of a type. Raises TypeError for types that JSON has not."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in TYPES:
        return {"type": TYPES[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return enum_schema([member.value for member in hint])
    if origin is Literal:
        return enum_schema(list(arguments))
    if origin in (Union, UnionType):
        return union_schema(arguments)
    if origin is list and arguments:
        return {"type": "array", "items": type_schema(arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [type_schema(argument) for argument in arguments]}
    if origin is dict and len(arguments) == 2:
        return {"type": "object", "additionalProperties": type_schema(arguments[1])}
    raise TypeError(f"no JSON type for the hint {hint}")


def enum_schema(values: list[Any]) -> dict[str, Any]:
    """Schema of a value that is one of some JSON scalars."""
    if not values or any(type(value) not in SCALARS for value in values):
        raise TypeError(f"choices must be strings, numbers, booleans or null, got {values}")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def union_schema(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Schema of a value of one of several types; None makes it nullable."""
    schemas = [type_schema(argument) for argument in arguments if argument is not NoneType]
    nullable = {"nullable": True} if NoneType in arguments else {}
    if len(schemas) == 1:
        return {**schemas[0], **nullable}
    if all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        return {"type": names[0] if len(names) == 1 else names, **nullable}
    return {"anyOf": schemas, **nullable}


def with_description(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Schema with a description, which may end with choices such as `(choices: ["tea", "coffee"])`."""
    match = CHOICES.search(text)
    if match is None:
        return {**schema, "description": text}
    choices = [choice.strip() if isinstance(choice, str) else choice for choice in json.loads(match[1])]
    return {**schema, "enum": choices, "description": text[: match.start()].strip()}


def split_docstring(doc: str) -> dict[str, str]:
    """Sections of a docstring by their title; the text before them has the title ''."""
    sections, title, start = {}, "", 0
    for match in SECTION.finditer(doc):
        sections[title] = doc[start : match.start()]
        title, start = match[1] or match[2], match.end()
    sections[title] = doc[start:]
    return sections


def parse_arguments(text: str) -> dict[str, str]:
    """Descriptions of the arguments in an `Args:` section. Lines that are indented deeper continue a description."""
    descriptions: dict[str, str] = {}
    name, indent = "", ""
    for line in filter(str.strip, text.split("\n")):
        match = ARGUMENT.match(line)
        if match and not (name and match[1].startswith(indent) and len(match[1]) > len(indent)):
            indent, name, descriptions[match[2]] = match[1], match[2], match[3].strip()
        elif name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions
