"""Rewards that compare the text or the length of an answer: equality, numbers, patterns, schemas, tags, tokens."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tunekit.environments.answers import is_close, last_number
from tunekit.errors import FieldError, UserError, check_range
from tunekit.evaluation.answer_checks import AnswerChecks, answer_matches, is_valid
from tunekit.rewards.base import AnswerReward
from tunekit.rollouts.rollout import Rollout


@dataclass(frozen=True)
class ExactMatch(AnswerReward):
    """1 if the answer equals the text in a column, without spaces around it; otherwise 0."""

    kind: ClassVar[str] = "exact_match"
    column_key: ClassVar[str] = "column"
    column: str = "answer"  # Column with the expected text
    ignore_case: bool = False  # Compare in lower case

    def score(self, rollout: Rollout) -> float:
        answer, expected = rollout.completion.strip(), column_text(rollout, self.column).strip()
        return float(answer.casefold() == expected.casefold() if self.ignore_case else answer == expected)


@dataclass(frozen=True)
class NumericMatch(AnswerReward):
    """1 if the last number of the answer equals the last number in a column; otherwise 0."""

    kind: ClassVar[str] = "numeric_match"
    column_key: ClassVar[str] = "column"
    column: str = "answer"  # Column with the expected number, or with a text that ends with it, as in GSM8K
    tolerance: float = 1e-6  # Allowed difference; relative to expected numbers above 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "tolerance", ge=0)

    def score(self, rollout: Rollout) -> float:
        number = last_number(rollout.completion)
        return float(number is not None and is_close(number, expected_number(rollout, self.column), self.tolerance))


@dataclass(frozen=True)
class RegexMatch(AnswerReward):
    """1 if the answer contains a regular expression; otherwise 0."""

    kind: ClassVar[str] = "regex_match"
    column_key: ClassVar[str] = "column"
    regex: str  # Regular expression, such as `####\s*(-?\d+)`
    # Column with a text in which the groups of the last occurrence must be the same; null: any occurrence counts
    column: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        AnswerChecks(regex=self.regex)  # raises FieldError for an invalid pattern

    def score(self, rollout: Rollout) -> float:
        expected = None if self.column is None else column_text(rollout, self.column)
        return float(answer_matches(re.compile(self.regex), rollout.completion, expected))


@dataclass(frozen=True)
class JsonSchemaMatch(AnswerReward):
    """1 if the answer is JSON that a JSON Schema allows; otherwise 0."""

    kind: ClassVar[str] = "json_schema_match"
    json_schema: str  # File with the JSON Schema

    @cached_property
    def validator(self) -> Any:
        return AnswerChecks(json_schema=self.json_schema).validator

    def check(self, columns: Collection[str]) -> None:
        """Raise UserError if the file is not a JSON Schema."""
        assert self.validator is not None

    def score(self, rollout: Rollout) -> float:
        return float(is_valid(self.validator, rollout.completion))


@dataclass(frozen=True)
class Length(AnswerReward):
    """1 if the number of sampled tokens is within limits; otherwise 0."""

    kind: ClassVar[str] = "length"
    min_tokens: int = 0  # Shortest answer
    max_tokens: int | None = None  # Longest answer; null: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise FieldError("max_tokens", f"must be >= min_tokens ({self.min_tokens}), got {self.max_tokens}")

    def score(self, rollout: Rollout) -> float:
        length = rollout.num_sampled_tokens
        return float(self.min_tokens <= length and (self.max_tokens is None or length <= self.max_tokens))


@dataclass(frozen=True)
class SoftOverlongPunishment(AnswerReward):
    """0 for short answers, falling to -1 at the maximum length (DAPO, arXiv:2503.14476, equation 13)."""

    kind: ClassVar[str] = "soft_overlong_punishment"
    max_completion_len: int  # Sampled tokens from which the score is -1
    soft_punish_cache: int  # Tokens before the maximum over which the score falls from 0 to -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.soft_punish_cache <= self.max_completion_len:
            raise FieldError(
                "soft_punish_cache", f"must be from 1 to {self.max_completion_len}, got {self.soft_punish_cache}"
            )

    def score(self, rollout: Rollout) -> float:
        excess = rollout.num_sampled_tokens - (self.max_completion_len - self.soft_punish_cache)
        return -min(max(excess / self.soft_punish_cache, 0.0), 1.0)


@dataclass(frozen=True)
class TaggedReward(AnswerReward):
    """Scores of torchtune's rewards for GSM8K."""

    column: str = "answer"  # Column with the expected answer
    answer_tag: str = "answer"  # Tag of the final answer, as in <answer>42</answer>
    positive_reward: float = 1.0  # Score of a good answer
    negative_reward: float = 0.0  # Score of a bad answer

    def sections(self, tag: str, text: str) -> list[re.Match[str]]:
        """Occurrences of <tag>...</tag>."""
        return list(re.finditer(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL))


@dataclass(frozen=True)
class GSM8KCorrectness(TaggedReward):
    """`positive_reward` if the final answer is the expected number, half of it if it appears anywhere in the text.

    The final answer is in the last <answer> tag; without one, it is the last number of the text.
    """

    kind: ClassVar[str] = "gsm8k_correctness"
    column_key: ClassVar[str] = "column"

    def score(self, rollout: Rollout) -> float:
        text, expected = rollout.completion, column_text(rollout, self.column).rpartition("####")[2].strip()
        answer = next((match[1] for match in reversed(self.sections(self.answer_tag, text))), text)
        number, expected_value = last_number(answer), last_number(expected)
        if answer.strip() == expected or (
            number is not None and expected_value is not None and is_close(number, expected_value)
        ):
            return self.positive_reward
        return self.positive_reward / 2 if expected in text else self.negative_reward


@dataclass(frozen=True)
class GSM8KFormat(TaggedReward):
    """Sum of two scores: one <think> section precedes one <answer> section; tags and texts are on separate lines."""

    kind: ClassVar[str] = "gsm8k_format"
    think_tag: str = "think"  # Tag of the reasoning, as in <think>...</think>

    def score(self, rollout: Rollout) -> float:
        text = rollout.completion
        think, answer = self.sections(self.think_tag, text), self.sections(self.answer_tag, text)
        is_ordered = len(think) == len(answer) == 1 and think[0].start() < answer[0].start()
        lines = [rf"<{re.escape(tag)}>\n.*?\n</{re.escape(tag)}>\n" for tag in (self.think_tag, self.answer_tag)]
        is_strict = re.match("".join(lines) + "$", text, re.DOTALL | re.MULTILINE) is not None
        return sum(self.positive_reward if passed else self.negative_reward for passed in (is_ordered, is_strict))


def column_value(rollout: Rollout, column: str) -> Any:
    """Value of a column; UserError if the row has none."""
    if rollout.prompt.columns.get(column) is None:
        raise UserError(f"{rollout.prompt.where}: the row has no value in column {column!r}. Add it.")
    return rollout.prompt.columns[column]


def column_text(rollout: Rollout, column: str) -> str:
    """Value of a column as text; numbers, lists and objects as JSON."""
    value = column_value(rollout, column)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def expected_number(rollout: Rollout, column: str) -> float:
    """Number in a column; UserError if there is none."""
    text = column_text(rollout, column)
    number = last_number(text)
    if number is None:
        raise UserError(f"{rollout.prompt.where}: column {column!r} has {text[:50]!r} instead of a number. Correct it.")
    return number
