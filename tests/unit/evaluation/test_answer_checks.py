"""Checks of answers: exact match, regular expressions compared with the expected answer, JSON Schema."""

import json
from pathlib import Path

import pytest

from tunekit.errors import FieldError, UserError
from tunekit.evaluation.answer_checks import AnswerChecks

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(("pattern", "answer", "expected", "passes"), [
    (r"\d", "seven", "seven", False),
    (r"\d", "7", "8", True),  # without groups, the pattern only has to occur
    (r"#### (\d+)", "Half of 8 is 4. #### 4", "4 + 0 = 4 #### 4", True),
    (r"#### (\d+)", "#### 5", "#### 4", False),
    (r"#### (\d+)", "#### 5, no: #### 4", "#### 3 #### 4", True),  # the last match
    (r"#### (\d+)", "4", "#### 4", False),
    (r"#### (\d+)", "#### 4", None, True),
    (r"#### (\d+)", "#### 4", "nothing to compare with", True),
    (r"(a)|(b)", "a", "b", False),
])  # fmt: skip
def test_groups_of_a_pattern_equal_those_of_the_expected_answer(
    pattern: str, answer: str, expected: str | None, passes: bool
) -> None:
    assert AnswerChecks(pattern).scores(answer, expected)["regex_match"] is passes


@pytest.mark.parametrize(("answer", "passes"), [
    ('{"a": 1}', True), ('{"a": 1, "b": 2}', True), ('{"a": "1"}', False), ("{}", False), ('{"a": 1', False),
    ("", False), ('{"a": 1} ', True), ('```json\n{"a": 1}\n```', False), ("[" * 100_000, False),
])  # fmt: skip
def test_answers_are_json_that_the_schema_allows(answer: str, passes: bool, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    checks = AnswerChecks(json_schema=str(tmp_path / "schema.json"))
    assert checks.scores(answer, None) == {"json_schema_match": passes}


def test_exact_match_needs_an_expected_answer() -> None:
    assert AnswerChecks().scores("a", "a") == {"exact_match": True}
    assert AnswerChecks().scores("a", "a ") == {"exact_match": False}
    assert AnswerChecks().scores("a", None) == {}


@pytest.mark.parametrize("content", [
    None, "{", '{"type": "no type"}', "[1]", "5", '{"properties": {"a": {"$ref": "#/$defs/b"}}}', '{"$ref": "b.json"}',
])  # fmt: skip
def test_unusable_schemas_are_errors(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "schema.json").write_text(content)
    with pytest.raises(UserError, match=r"^part\.json_schema: .*schema\.json: ") as error:
        AnswerChecks(None, str(tmp_path / "schema.json"), "part.").scores("", None)
    assert "\n" not in str(error.value)


def test_references_within_the_file(tmp_path: Path) -> None:
    schema = '{"$defs": {"a/b": {"type": "integer"}}, "items": {"$ref": "#/$defs/a~1b"}, "type": "array"}'
    (tmp_path / "schema.json").write_text(schema)
    checks = AnswerChecks(json_schema=str(tmp_path / "schema.json"))
    assert [checks.scores(text, None)["json_schema_match"] for text in ("[1, 2]", '["a"]')] == [True, False]


def test_invalid_pattern_names_its_field() -> None:
    with pytest.raises(FieldError) as error:
        AnswerChecks("(")
    assert error.value.field == "regex"
