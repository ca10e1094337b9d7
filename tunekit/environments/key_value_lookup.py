"""A chain of lookups: the value of each key is the next key, so that the model needs several turns."""

from collections.abc import Mapping
from typing import Any

from tunekit.environments.answers import is_expected
from tunekit.environments.base import Environment


class KeyValueLookup(Environment):
    """Reward 1 if the final answer has the value at the end of the chain."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {}
        self.expected: Any = None
        self.reward = 0.0

    def reset(self, table: Mapping[str, Any], answer: Any, **columns: Any) -> None:
        # A table with typed columns stores every key in every row.
        self.table, self.expected = {key: value for key, value in table.items() if value is not None}, answer

    def lookup(self, key: str) -> str:
        """Look up the value of a key.

        Args:
            key: The key

        Returns:
            The value.
        """
        if key not in self.table:
            raise KeyError(f"no key {key}")
        return str(self.table[key])

    def step(self, answer: str) -> None:
        self.reward = float(is_expected(answer, self.expected))

    def get_reward(self) -> float:
        return self.reward
