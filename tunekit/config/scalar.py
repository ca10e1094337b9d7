"""Unquoted YAML 1.2 scalars. `on`, `no`, `012` and `1:30` are text, and `2e-4` is a number."""

import re

NULL = re.compile(r"~|null|Null|NULL|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_DIGITS = "[0-9]+(?:_[0-9]+)*"
INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
FLOAT = re.compile(
    rf"[-+]?(?:(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?|{_DIGITS}[eE][-+]?[0-9]+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
TYPE_LABELS = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
_MAX_DIGITS = 300  # longer text is not a number: no float has this many digits


def parse_scalar(text: str) -> str | int | float | bool | None:
    """Parse an unquoted scalar."""
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    return parse_number(text)


def parse_number(text: str) -> str | int | float:
    """Parse a number; returns `text` if it is not one."""
    if len(text) > _MAX_DIGITS:
        return text
    if INT.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
    return text
