"""JSON values in rows: type names for messages, values encoded as strings, and removal of null keys."""

import json
from typing import Any, NoReturn

from tunekit.errors import UserError

MAX_DEPTH = 64  # nesting limit: schemas and arguments are flatter, and Python's recursion is limited
TYPE_NAMES = {type(None): "null", str: "a string", bool: "a boolean", dict: "an object", list: "a list"}


def json_type(value: Any) -> str:
    """Return the JSON type of a value with its article, for error messages."""
    return TYPE_NAMES.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def parse_json(text: str, path: str) -> Any:
    """Parse a JSON string. Raise UserError, prefixed with `path`, if it is invalid."""
    try:
        return json.loads(text, parse_constant=reject_constant)
    except RecursionError:
        raise UserError(f"{path}: JSON string is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: string is not valid JSON: {error}") from None


def reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed in JSON")


def drop_null_keys(value: Any, path: str, depth: int = 0) -> Any:
    """Remove keys whose value is null: tables with typed columns store every key in every row."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise UserError(f"{path}: {value} is not allowed in JSON")
        return value
    if depth == MAX_DEPTH:
        raise UserError(f"{path}: nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [drop_null_keys(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON value, got {json_type(value)}")
    for key in value:
        if not isinstance(key, str):
            raise UserError(f"{path}: keys must be strings, got {key!r}")
    return {key: drop_null_keys(item, f"{path}.{key}", depth + 1) for key, item in value.items() if item is not None}
