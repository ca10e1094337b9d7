"""Answers in JSON that follow a schema."""

import json
from typing import Any

from tunekit.environments.base import Environment


class JsonAnswer(Environment):
    """Reward 1 if the last answer is JSON that the schema allows and equals the expected value, if there is one."""

    def __init__(self, validator: Any, max_attempts: int) -> None:
        self.validator, self.max_attempts = validator, max_attempts
        self.expected: Any = None
        self.num_attempts, self.reward = 0, 0.0

    def reset(self, answer: Any = None, **columns: Any) -> str:
        self.expected = json.loads(answer) if isinstance(answer, str) else answer
        return f"\nAnswer with JSON of this schema: {json.dumps(self.validator.schema)}"

    def step(self, answer: str) -> str | None:
        self.num_attempts += 1
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError) as error:
            return self._retry(f"Not valid JSON: {error}.")
        problem = next(self.validator.iter_errors(value), None)
        if problem is not None:
            return self._retry(f"{problem.json_path}: {problem.message}.")
        self.reward = float(self.expected is None or value == self.expected)
        return None

    def _retry(self, problem: str) -> str | None:
        """The problem as observation; None after the last attempt."""
        return None if self.num_attempts == self.max_attempts else f"{problem} Answer again."

    def get_reward(self) -> float:
        return self.reward
