"""Rewards from a function of the user, with the signature of TRL's reward functions."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tunekit.config.user_code import load_attribute
from tunekit.data.chat_template.messages import Message
from tunekit.data.check_target import ColumnReaders
from tunekit.environments.base import signature_readers
from tunekit.errors import UserError
from tunekit.rewards.base import RewardFunction
from tunekit.rewards.context import RewardContext
from tunekit.rollouts.rollout import Rollout

ARGUMENTS = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"
)  # fmt: skip
ROW_ARGUMENTS = ("prompt", "completion", "completion_ids")  # columns with these names are not passed
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class UserFunction(RewardFunction):
    """Scores from a Python function, as in TRL: `fn(prompts, completions, completion_ids, **columns)`.

    Prompts and completions are lists of messages, or texts with `prompt_format: text`. The function returns a list with
    a number or None for each. It may be a coroutine (`async def`): these run at the same time. Further keyword
    arguments are those of TRL: `trainer_state` (`global_step`, `max_steps`, `epoch`), `log_metric(name, value)`,
    `log_extra(column, values)`, and `environments`, one for each answer, in runs with an environment.
    """

    kind: ClassVar[str] = "function"
    reference_key: ClassVar[str] = "function"
    function: str  # File and name of the function, such as `rewards.py:count_words`

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]

    @cached_property
    def callable(self) -> Callable[..., Any]:
        function = load_attribute(self.function, "function")
        if not callable(function):
            raise UserError(f"function: {self.function} is not callable. Name a function.")
        return function

    @cached_property
    def parameters(self) -> Sequence[inspect.Parameter]:
        return tuple(inspect.signature(self.callable).parameters.values())

    @property
    def column_readers(self) -> ColumnReaders:
        return signature_readers(self.callable)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.callable)

    def check(self, columns: Collection[str]) -> None:
        """Raise UserError if the function does not exist, or has a parameter that is no column and has no default."""
        for parameter in self.parameters:
            is_required = parameter.default is parameter.empty and parameter.kind not in VARIADIC
            if is_required and parameter.name not in (*ARGUMENTS, *columns):
                known = ", ".join((*ARGUMENTS, *columns))
                raise UserError(
                    f"function: {self.function} has a parameter {parameter.name!r}, but the rows have no such column "
                    f"(known: {known}). Rename it, or give it a default value."
                )

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float | None]:
        return self.score_in_context(rollouts, RewardContext())

    def score_in_context(self, rollouts: Sequence[Rollout], context: RewardContext) -> Sequence[float | None]:
        values: dict[str, Any] = {
            name: [rollout.prompt.columns.get(name) for rollout in rollouts]
            for name in dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns)
            if name not in ROW_ARGUMENTS
        }
        values |= {
            "prompts": [prompt_value(rollout) for rollout in rollouts],
            "completions": [completion_value(rollout) for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "trainer_state": context.trainer_state,
            "log_extra": context.log_extra,
            "log_metric": context.log_metric,
        }
        environments = [rollout.environment for rollout in rollouts]
        names = {parameter.name for parameter in self.parameters}
        if None not in environments or "environments" in names:
            values["environments"] = environments if None not in environments else None
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self.parameters):
            values = {name: value for name, value in values.items() if name in names}
        result = self.callable(**values)
        return asyncio.run(result) if inspect.iscoroutine(result) else result


def prompt_value(rollout: Rollout) -> str | list[Message]:
    """Messages of a prompt, or its text if the model continues it."""
    messages = rollout.prompt.messages
    return messages[-1]["content"] if rollout.prompt.is_text else list(messages)


def completion_value(rollout: Rollout) -> str | list[Message]:
    """Messages of an answer, or its text if it continues a text."""
    return rollout.completion if rollout.prompt.is_text else list(rollout.messages)
