"""Reward for answers that are mathematically equal to a solution, checked by the library math-verify."""

import threading
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from tunekit.errors import UserError
from tunekit.rewards.answer_rewards import column_text
from tunekit.rewards.base import AnswerReward
from tunekit.rollouts.rollout import Rollout

PARSE_SECONDS, VERIFY_SECONDS = 10, 5  # limits of math-verify, whose symbolic simplification may not end


@dataclass(frozen=True)
class Accuracy(AnswerReward):
    """1 if the LaTeX expression of the answer, in `\\boxed{}` if there is one, equals the solution in a column.

    `1/2`, `0.5` and `\\frac{1}{2}` are equal. Does not apply to rows whose solution math-verify cannot parse. As
    `accuracy_reward` of TRL.
    """

    kind: ClassVar[str] = "accuracy"
    column_key: ClassVar[str] = "column"
    column: str = "solution"  # Column with the solution

    def check(self, columns: Collection[str]) -> None:
        super().check(columns)
        if find_spec("math_verify") is None:
            raise UserError(
                "kind: accuracy needs math-verify, which is not installed. Run `pip install 'tunekit[math]'`."
            )

    def score(self, rollout: Rollout) -> float | None:
        math_verify: Any = import_module("math_verify")
        # The limits are alarms, which only the main thread can set.
        has_alarm = threading.current_thread() is threading.main_thread()
        limit = {"parsing_timeout": PARSE_SECONDS if has_alarm else None}
        solution = math_verify.parse(column_text(rollout, self.column), **limit)
        if not solution:
            return None
        options = {"extraction_config": [latex_config()], "extraction_mode": "first_match", **limit}
        answer = math_verify.parse(rollout.completion, **options)
        return float(math_verify.verify(solution, answer, timeout_seconds=VERIFY_SECONDS if has_alarm else None))


def latex_config() -> Any:
    """Expressions in LaTeX delimiters, the boxed ones first, with units."""
    normalization = import_module("latex2sympy2_extended").NormalizationConfig(units=True)
    options = {"boxed_match_priority": 0, "try_extract_without_anchor": False}
    return import_module("math_verify").LatexExtractionConfig(normalization_config=normalization, **options)
