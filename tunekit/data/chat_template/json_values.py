"""Values of JSON: what they are called, those that are written as a string, and those that no text can hold."""

import json
from typing import Any, NoReturn

from tunekit.errors import UserError

DEPTH = 64  # objects in objects: deeper is no schema and no argument, and Python's own stack has an end
WORDS = {type(None): "null", str: "a string", bool: "a boolean", dict: "an object", list: "a list"}


def json_type(value: Any) -> str:
    """What a value is, in the words of JSON."""
    return WORDS.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def parse_json(text: str, path: str) -> Any:
    """The value that a string holds as JSON."""
    try:
        return json.loads(text, parse_constant=refused)
    except RecursionError:
        raise UserError(f"{path}: the JSON in this string is nested too deep") from None
    except ValueError as error:
        raise UserError(f"{path}: a string that holds no JSON: {error}") from None


def refused(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def drop_null_keys(value: Any, path: str, depth: int = 0) -> Any:
    """A value without the keys of objects that are null: tables with typed columns write every key into every row."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise UserError(f"{path}: {value} is no number of JSON")
        return value
    if depth == DEPTH:
        raise UserError(f"{path}: nested more than {DEPTH} deep")
    if isinstance(value, list):
        return [drop_null_keys(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        raise UserError(f"{path}: want a value of JSON, this is {json_type(value)}")
    for key in value:
        if not isinstance(key, str):
            raise UserError(f"{path}: want strings as keys, not {key!r}")
    return {key: drop_null_keys(item, f"{path}.{key}", depth + 1) for key, item in value.items() if item is not None}
