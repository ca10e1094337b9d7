"""A chain of lookups: the value of each key is the next key, so that the model needs several turns."""

from collections.abc import Mapping
from typing import Any

from tunekit.environments.answers import AnswerEnvironment


class KeyValueLookup(AnswerEnvironment):
    """Reward 1 if the final answer has the value at the end of the chain."""

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
