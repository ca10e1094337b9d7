"""Environments on OpenEnv servers, through the client of the package openenv-core. Each answer is an action."""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from tunekit.environments.base import Environment
from tunekit.environments.tool_calls import to_text
from tunekit.errors import UserError

RESET_COLUMNS = ("seed", "episode_id")  # passed to `reset`, if a row has them
# Errors of connections and of responses: the client does not check their types
CLIENT_ERRORS = (OSError, RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


def load_client() -> Any:
    """Class of the client for dictionaries. Raises UserError if the package is not installed."""
    try:
        return importlib.import_module("openenv.core.generic_client").GenericEnvClient
    except ImportError as error:
        fix = "Run: pip install 'tunekit[openenv]'"
        raise UserError(f"kind: openenv needs the package openenv-core ({error}). {fix}") from error


class OpenEnvEnvironment(Environment):
    """An episode on a server. Its reward is the sum of the rewards of all steps."""

    def __init__(self, base_url: str, action_field: str | None, observation_field: str | None, timeout: float) -> None:
        self.action_field, self.observation_field = action_field, observation_field
        self.base_url, self.reward = base_url, 0.0
        self.client = load_client()(base_url=base_url, message_timeout_s=timeout).sync()

    def reset(self, *args: Any, **columns: Any) -> str:
        """Start an episode with the columns `seed` and `episode_id`, if the row has them."""
        try:
            self.client.connect()
        except CLIENT_ERRORS as error:
            raise UserError(f"environment.base_url: {self.base_url}: {error}. Start the server.") from None
        options = {name: columns[name] for name in RESET_COLUMNS if columns.get(name) is not None}
        return self._observe(self.client.reset(**options))

    def step(self, answer: str) -> str | None:
        action = self._parse_action(answer)
        if action is None:
            return "Answer with an action: a JSON object."
        text = self._observe(self.client.step(action))
        return None if self.done else text

    def _parse_action(self, answer: str) -> Mapping[str, Any] | None:
        """Action of an answer; None if it must be JSON and is not."""
        if self.action_field is not None:
            return {self.action_field: answer}
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def _observe(self, result: Any) -> str:
        """Text of an observation. Adds the reward of the step."""
        self.reward += float(result.reward or 0)
        self.done = bool(result.done)
        observation = result.observation
        if self.observation_field is not None:
            if self.observation_field not in observation:
                names = ", ".join(observation) or "none"
                raise ValueError(f"the observation has no field {self.observation_field!r} (fields: {names})")
            observation = observation[self.observation_field]
        return to_text(observation)

    def get_reward(self) -> float:
        return self.reward

    def close(self) -> None:
        self.client.close()
