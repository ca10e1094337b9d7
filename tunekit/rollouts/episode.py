"""State of an episode: its tokens so far, and what the environment says to an answer."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunekit.config.choices import kind_name
from tunekit.data.chat_template.messages import Message
from tunekit.environments.base import Environment, get_tool_schemas, get_tools
from tunekit.environments.config import EnvironmentConfig
from tunekit.environments.tool_calls import error_result, run_in_thread, run_tool
from tunekit.errors import UserError, describe_user_code_error
from tunekit.rollouts.rollout import FinishReason, PromptRow, Rollout
from tunekit.rollouts.user_numbers import to_metrics, to_number


@dataclass(frozen=True)
class EpisodeStart:
    """The prompt of an episode, with the text of the environment, and its tools."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None


@dataclass(frozen=True)
class TurnResult:
    """Messages that follow an answer (none: the episode ends), and the environment's numbers at the end."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_failures: int = 0  # calls whose result is an error


@dataclass(eq=False)
class Episode:
    """One conversation in progress."""

    request_id: str
    sample_name: str  # names the random numbers of its samples
    group: int
    prompt: PromptRow
    sampled: list[int] = field(default_factory=list)  # tokens of the current answer
    tokens: list[int] = field(default_factory=list)  # after the prompt, with the current answer
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    num_tool_iterations: int = 0
    num_tool_calls: int = 0
    num_failures: int = 0
    finish_reason: FinishReason | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    environment: Environment | None = None  # after the end, on the rank that ran it

    def add(self, token: int, logprob: float) -> None:
        """Add a sampled token."""
        self.sampled.append(token)
        self.append([token], True, [logprob])

    def append(self, tokens: Sequence[int], is_sampled: bool, logprobs: Sequence[float]) -> None:
        self.tokens += tokens
        self.loss_mask += [is_sampled] * len(tokens)
        self.logprobs += logprobs

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model did not sample, and start the next answer."""
        self.append(tokens, False, [0.0] * len(tokens))
        self.sampled = []

    def to_rollout(self) -> Rollout:
        """The episode after its end."""
        assert self.finish_reason is not None
        before = len(self.prompt.tokens)
        counts = {"num_turns": self.num_turns, "num_tool_calls": self.num_tool_calls}
        return Rollout(
            prompt=self.prompt,
            group=self.group,
            tokens=np.array([*self.prompt.tokens, *self.tokens], np.int32),
            loss_mask=np.array([False] * before + self.loss_mask, bool),
            logprobs=np.array([0.0] * before + self.logprobs, np.float32),
            finish_reason=self.finish_reason,
            messages=tuple(self.messages),
            environment_reward=self.reward,
            metrics={**counts, "num_tool_failures": self.num_failures, **self.metrics},
            environment=self.environment,
        )


class EpisodeEnvironment:
    """The environment of one episode. Its calls name the row if code of the user raises."""

    def __init__(self, config: EnvironmentConfig, prompt: PromptRow) -> None:
        self.config, self.prompt = config, prompt
        self.name = kind_name(type(config))
        self.environment: Environment = self.call("__init__", config.create)
        self.name, self.is_open = type(self.environment).__name__, True
        try:
            self.tools = get_tools(self.environment)
        except UserError:
            self.discard()
            raise

    def reset(self) -> EpisodeStart:
        """The prompt, with the text of the environment at the end of the last user message."""
        columns = accepted_columns(self.environment.reset, self.prompt.columns)
        text = self.call("reset", lambda: as_text(self.environment.reset(**columns)))
        schemas = [*(self.prompt.tools or ()), *get_tool_schemas(self.environment)]
        return EpisodeStart(with_text(self.prompt.messages, text), schemas or None)

    def run_calls(self, calls: Sequence[Mapping[str, Any]]) -> TurnResult:
        """Results of the tool calls of an answer."""
        limit = self.config.max_tool_calls_per_turn
        results = [run_tool(self.tools, call, self.config.tool_timeout_seconds) for call in calls[:limit]]
        refused = error_result(f"only {limit} calls are allowed at once")
        results += [refused] * (len(calls) - limit)
        messages = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result.content}
            for call, result in zip(calls, results, strict=True)
        ]
        num_failures = sum(result.is_error for result in results)
        return TurnResult(() if self.environment.done else messages, num_failures=num_failures)

    def step(self, answer: str) -> TurnResult:
        """Observation after an answer without calls."""
        text = self.call("step", lambda: as_text(self.environment.step(answer)))
        if text is None or self.environment.done:
            return TurnResult()
        return TurnResult([{"role": "user", "content": text}])

    def end(self, result: TurnResult) -> TurnResult:
        """The result with reward and metrics. Closes the environment."""
        value = self.call("get_reward", self.environment.get_reward)
        reward = to_number(value, self.describe_call("get_reward"))
        values = self.call("get_metrics", self.environment.get_metrics)
        metrics = to_metrics(values, self.describe_call("get_metrics"))
        self.close()
        return replace(result, messages=(), reward=None if math.isnan(reward) else reward, metrics=metrics)

    def close(self) -> None:
        """Close the environment, if it is open."""
        if self.is_open:
            self.is_open = False
            self.call("close", self.environment.close)

    def discard(self) -> None:
        """Close the environment of an episode that another error ends."""
        with suppress(UserError):
            self.close()

    def describe_call(self, name: str) -> str:
        """Row and method, for error messages."""
        return f"{self.prompt.where}: environment {self.name}.{name}"

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Result of a method. Raises UserError with the row if it raises or hangs."""
        where = self.describe_call(name)
        seconds = self.config.tool_timeout_seconds
        future = run_in_thread(function)
        try:
            error = future.exception(seconds)
        except TimeoutError:
            future.add_done_callback(close_late)
            fix = "Raise environment.tool_timeout_seconds."
            raise UserError(f"{where}: no result after {seconds:g} s. {fix}") from None
        if error is None or isinstance(error, UserError):
            return future.result()
        raise UserError(f"{where}: {describe_user_code_error(error)}. Fix the row or the environment.") from error


def as_text(value: Any) -> str | None:
    """Text that a method returns; None if it returns none."""
    return None if value is None else str(value)


def close_late(future: Future[Any]) -> None:
    """Close an environment that was created after the time limit."""
    if future.exception() is None and isinstance(environment := future.result(), Environment):
        with suppress(Exception):
            environment.close()


def accepted_columns(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that a function has parameters for; all of them if it takes any keyword."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}


def with_text(messages: Sequence[Message], text: str | None) -> Sequence[Message]:
    """Messages with a text at the end of the last user message."""
    if text is None:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{text}"}]
