"""Rewards that compare the text or the length of an answer."""

import json
from pathlib import Path

import pytest
from trl.rewards import accuracy_reward

from tests.helpers.rollouts import make_rollout
from tunekit.environments.answers import last_number
from tunekit.errors import FieldError, UserError
from tunekit.rewards import math_accuracy
from tunekit.rewards.answer_rewards import (
    ExactMatch,
    GSM8KCorrectness,
    GSM8KFormat,
    JsonSchemaMatch,
    Length,
    NumericMatch,
    RegexMatch,
    SoftOverlongPunishment,
)
from tunekit.rewards.base import score_rollouts
from tunekit.rewards.math_accuracy import Accuracy


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72), ("It is $1,234.50.", 1234.5), ("x=-3", -3), ("5-2", 2), ("10, 20, 300", 300), ("-.5", -0.5),
        ("2e-3", 0.002), ("(\u22124)", -4), ("1,2345", 2345), ("none", None), ("steps 1, 2\n#### 18", 18),
    ],
)  # fmt: skip
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_exact_match() -> None:
    assert ExactMatch().score(make_rollout(" Paris\n", answer="Paris")) == 1
    assert ExactMatch().score(make_rollout("paris", answer="Paris")) == 0
    assert ExactMatch(ignore_case=True).score(make_rollout("paris", answer="Paris")) == 1
    assert ExactMatch(column="n").score(make_rollout("7", n=7)) == 1


def test_numeric_match_has_a_tolerance() -> None:
    assert NumericMatch().score(make_rollout("so 1,000 in all", answer="a\n#### 1000")) == 1
    assert NumericMatch().score(make_rollout("3.15", answer=3.14)) == 0
    assert NumericMatch(tolerance=0.01).score(make_rollout("3.15", answer=3.14)) == 1
    assert NumericMatch().score(make_rollout("many", answer=3)) == 0
    with pytest.raises(UserError, match="rows.jsonl:1"):
        NumericMatch().score(make_rollout("3", answer="three"))
    with pytest.raises(UserError, match="rows.jsonl:1"):
        NumericMatch().score(make_rollout("3", answer=None))


def test_accuracy_equals_trl() -> None:
    solutions = [r"\frac{1}{2}", r"$x^2+2x+1$", "72", "\\boxed{5}", "no formula", r"$\{1,2\}$"]
    answers = [
        r"\boxed{0.5}",
        r"\boxed{\frac{2}{4}}",
        "$(x+1)^2$",
        "72",
        r"it is \boxed{72}",
        "$5$ or $6$",
        "",
        r"$\{2,1\}$",
    ]
    rows = [(answer, solution) for answer in answers for solution in solutions]
    completions = [[{"role": "assistant", "content": answer}] for answer, _ in rows]
    expected = accuracy_reward(completions, [solution for _, solution in rows])
    assert [Accuracy().score(make_rollout(answer, solution=solution)) for answer, solution in rows] == expected
    assert {0.0, 1.0, None} == set(expected)


def test_accuracy_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    Accuracy("gold").check(["gold"])
    monkeypatch.setattr(math_accuracy, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^kind: accuracy needs .*tunekit\[math\]"):
        Accuracy("gold").check(["gold"])


def test_regex_match() -> None:
    assert RegexMatch(r"#### \d+").score(make_rollout("#### 5")) == 1
    assert RegexMatch(r"#### (\d+)", "answer").score(make_rollout("#### 4\n#### 5", answer="#### 5")) == 1
    assert RegexMatch(r"#### (\d+)", "answer").score(make_rollout("#### 4", answer="#### 5")) == 0
    with pytest.raises(FieldError):
        RegexMatch("(")


def test_json_schema_match(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "required": ["city"]}))
    reward = JsonSchemaMatch(str(file))
    reward.check(())
    answers = ['{"city": "Rome"}', "{}", "no JSON"]
    assert score_rollouts([reward], [make_rollout(text) for text in answers]).tolist() == [[1], [0], [0]]
    file.write_text("{")
    with pytest.raises(UserError, match=r"schema\.json"):
        JsonSchemaMatch(str(file)).check(())


def test_length() -> None:
    assert [Length(3, 5).score(make_rollout("", tokens)) for tokens in (2, 3, 5, 6)] == [0, 1, 1, 0]
    with pytest.raises(FieldError):
        Length(3, 2)
    with pytest.raises(FieldError):
        SoftOverlongPunishment(10, 11)


@pytest.mark.parametrize(
    ("text", "correct", "form"),
    [
        ("<think>\n2+3\n</think>\n<answer>\n5\n</answer>\n", 3, 2 * 3),  # strict
        ("<think>2+3</think> <answer>5</answer>", 3, 3 - 1),  # tags in order
        ("<answer>5</answer><think>2+3</think>", 3, -2),
        ("<think>a</think><think>b</think><answer>6</answer> or 5", 1.5, -2),
        ("It is 6", -1, -2),
    ],
)
def test_gsm8k(text: str, correct: float, form: float) -> None:
    values = {"positive_reward": 3.0, "negative_reward": -1.0}
    assert GSM8KCorrectness(**values).score(make_rollout(text, answer="2+3 is\n#### 5")) == correct
    assert GSM8KFormat(**values).score(make_rollout(text)) == form
