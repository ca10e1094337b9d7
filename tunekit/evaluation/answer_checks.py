"""Checks of generated answers: equal to the expected one, a regular expression, a JSON Schema."""

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tunekit import assets
from tunekit.errors import FieldError, UserError


@dataclass(frozen=True)
class AnswerChecks:
    """Checks that give metrics. `regex` and `json_schema` are values of config keys; None: no such metric."""

    regex: str | None = None
    json_schema: str | None = None
    section: str = ""  # of the config, for error messages

    def __post_init__(self) -> None:
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                raise FieldError("regex", f"not a regular expression: {error}, got {self.regex!r}") from None

    @cached_property
    def validator(self) -> Any:
        """Validator of the schema; None without one. Raises UserError if the file is not a JSON Schema."""
        if self.json_schema is None:
            return None
        try:
            jsonschema = importlib.import_module("jsonschema")
        except ImportError as error:
            fix = "Run: pip install 'tunekit[jsonschema]'"
            raise UserError(f"{self.section}json_schema: package jsonschema is not installed. {fix}") from error
        where = f"{self.section}json_schema: {self.json_schema}"
        try:
            schema = json.loads(assets.JSON_SCHEMAS.get(self.json_schema, Path(self.json_schema)).read_text("utf-8"))
            if not isinstance(schema, Mapping | bool):
                raise UserError(f"must be an object, got {json.dumps(schema)[:50]}")
            check_references(schema, schema)
            cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            cls.check_schema(schema)
        except OSError as error:
            raise UserError(f"{where}: cannot read the file: {error.strerror}. Set it to a JSON file.") from error
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON: {error}. Fix the file.") from error
        except (jsonschema.SchemaError, UserError) as error:
            problem = str(error) if isinstance(error, UserError) else error.message
            raise UserError(f"{where}: not a JSON Schema: {problem}. Fix the file.") from error
        return cls(schema)

    def scores(self, answer: str, expected: str | None) -> Mapping[str, bool]:
        """Whether an answer passes each check. Without an expected answer, there is no exact match."""
        scores = {} if expected is None else {"exact_match": answer == expected}
        if self.regex is not None:
            scores["regex_match"] = answer_matches(re.compile(self.regex), answer, expected)
        if self.validator is not None:
            scores["json_schema_match"] = is_valid(self.validator, answer)
        return scores


def check_references(node: Any, schema: Any) -> None:
    """Raise UserError for a reference below `node` that is not to a part of the schema."""
    for value in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        check_references(value, schema)
    if isinstance(node, Mapping) and isinstance(reference := node.get("$ref"), str):
        part = schema
        for name in reference.removeprefix("#").split("/")[1:]:
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
        if part is None or not reference.startswith("#"):
            raise UserError(f"$ref {reference} is not in the file")


def answer_matches(pattern: re.Pattern[str], answer: str, expected: str | None) -> bool:
    """Whether an answer contains the pattern, and its last occurrence has the groups of that in the expected answer."""
    groups, expected_groups = (last_groups(pattern, text) for text in (answer, expected or ""))
    return groups is not None and (expected_groups is None or groups == expected_groups)


def last_groups(pattern: re.Pattern[str], text: str) -> tuple[str | None, ...] | None:
    """Groups of the last occurrence of a pattern; None without one."""
    groups = None
    for match in pattern.finditer(text):
        groups = match.groups()
    return groups


def is_valid(validator: Any, text: str) -> bool:
    """Whether a text is JSON that a schema allows."""
    try:
        return validator.is_valid(json.loads(text))
    except (ValueError, RecursionError):
        return False
