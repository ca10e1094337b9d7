"""Schemas of forced calls: no properties that the schema does not name, unless it has keywords about them."""

from typing import Any

import jsonschema
import pytest

from tunekit.serving.constraints import call_schema, close_objects

CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(("schema", "valid", "closed"), [
    (CITY, {"name": "a"}, {"name": "a", "x": 1}),
    ({"type": "object", "properties": {"city": CITY}}, {"city": {"name": "a"}}, {"city": {"name": "a", "x": 1}}),
    ({"type": "array", "items": CITY}, [{"name": "a"}], [{"name": "a", "x": 1}]),
    ({"anyOf": [{"type": "null"}, CITY]}, {"name": "a"}, {"name": "a", "x": 1}),
    ({"$ref": "#/$defs/City", "$defs": {"City": CITY}}, {"name": "a"}, {"name": "a", "x": 1}),
    ({"type": "object", "properties": {"properties": {"type": "string"}}}, {"properties": "a"}, {"x": 1}),
    ({"type": "object", "additionalProperties": CITY}, {"k": {"name": "a"}}, {"k": {"name": "a", "x": 1}}),
    (CITY | {"additionalProperties": True}, {"name": "a", "x": 1}, None),
    (CITY | {"patternProperties": {"^x": {}}}, {"name": "a", "x": 1}, None),
    (CITY | {"allOf": [{"properties": {"x": {}}}]}, {"name": "a", "x": 1}, None),
])  # fmt: skip
def test_objects_are_closed(schema: dict[str, Any], valid: Any, closed: Any) -> None:
    before, after = (jsonschema.Draft202012Validator(item) for item in (schema, close_objects(schema)))
    assert before.is_valid(valid) and after.is_valid(valid)
    if closed is not None:
        assert before.is_valid(closed) and not after.is_valid(closed)


def test_function_without_parameters_has_none() -> None:
    validator = jsonschema.Draft202012Validator(call_schema([{"type": "function", "function": {"name": "stop"}}]))
    assert validator.is_valid({"name": "stop", "arguments": {}})
    assert not validator.is_valid({"name": "stop", "arguments": {"x": 1}})
