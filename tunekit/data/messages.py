"""A row's conversation, checked before a template sees it: templates pass over most faults in silence."""

from collections.abc import Mapping
from typing import Any

from tunekit.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
REFUSED = ("tool_calls", "function_call", "weight", "train")


def column(fields: Mapping[str, Any], name: str, option: str) -> Any:
    """A row's value of a column; `option` is the key of the config that names the column."""
    if name not in fields:
        have = ", ".join(map(str, fields)) or "none"
        raise UserError(f"the row has no column {name!r}; name the right one as `{option}` (it has: {have})")
    return fields[name]


def string(fields: Mapping[str, Any], name: str, option: str) -> str:
    """A row's column that must be a string."""
    value = column(fields, name, option)
    if not isinstance(value, str):
        raise UserError(f"{name}: want a string, this is {kind(value)}")
    return value


def conversation(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages of a row, each with a known role and a text; `name` is their column."""
    if not isinstance(value, list):
        raise UserError(f"{name}: want a list of messages, this is {kind(value)}")
    if not value:
        raise UserError(f"{name}: the conversation is empty")
    for index, item in enumerate(value):
        check(item, f"{name}[{index}]")
    return value


def check(message: Any, name: str) -> None:
    if not isinstance(message, dict):
        raise UserError(f"{name}: want an object with role and content, this is {kind(message)}")
    for key in REFUSED:
        if key in message and message[key] is not None:
            raise UserError(f"{name}: {key!r} is not supported; take it out or write it into the content")
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"{name}: unknown role {role!r}; want one of {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str):
        raise UserError(f"{name}: content must be a string, this is {kind(content)}")


def tool_schemas(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Tool schemas of a row; None if it has none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{name}: want a list of tool schemas (objects), this is {kind(value)}")
    return value


def kind(value: Any) -> str:
    """What a value is, in the words of JSON."""
    words = {type(None): "null", str: "a string", bool: "a boolean", dict: "an object", list: "a list"}
    return words.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
