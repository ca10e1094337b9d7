"""Comparison of final answers with expected ones."""

import re
from typing import Any

from tunekit.environments.base import Environment

NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212])?"  # a sign, unless it is an operator between numbers
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?"
)


def last_number(text: str) -> float | None:
    """Last number of a text, such as -1,234.5 or 2e-3; None without one."""
    last = None
    for match in NUMBER.finditer(text):
        last = match[0]
    return None if last is None else float(last.replace(",", "").replace("\u2212", "-"))


def is_close(number: float, expected: float, tolerance: float = 1e-6) -> bool:
    """Whether two numbers are equal up to a tolerance, which is relative to expected numbers above 1."""
    return abs(number - expected) <= tolerance * max(1.0, abs(expected))


def is_expected(answer: str, expected: Any) -> bool:
    """Whether the last number of an answer is the expected one, or the answer has the expected text as its words."""
    number = last_number(answer)
    if isinstance(expected, int | float):
        return number is not None and is_close(number, expected)
    text = str(expected).strip()
    if NUMBER.fullmatch(text):
        return number is not None and is_close(number, last_number(text) or 0.0)
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", answer) is not None


class AnswerEnvironment(Environment):
    """Reward 1 if the final answer has the expected number or text. `reset` sets it."""

    def __init__(self) -> None:
        self.expected: Any = None
        self.reward = 0.0

    def step(self, answer: str) -> None:
        self.reward = float(self.expected is not None and is_expected(answer, self.expected))

    def get_reward(self) -> float:
        return self.reward
