"""Base class of environments. Code of the user may derive from it: docs/environments.md has an example."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tunekit.data.check_target import ColumnReaders
from tunekit.environments.tool_schema import tool_schema


class Environment:
    """One episode at a time: a prompt, tools, observations and a reward. Each episode gets an instance of its own.

    The public methods of a subclass are the tools of the model, as in TRL's `environment_factory`: they need type hints
    and a docstring in Google style. Their results are observations. An exception is an observation too.
    """

    done = False  # set it to end the episode after the current turn

    def reset(self, *args: Any, **columns: Any) -> str | None:
        """Start an episode with the columns of a row. The returned text is appended to the last user message."""

    def step(self, answer: str) -> str | None:
        """Observation after an answer without tool calls, as the next user message; None ends the episode."""

    def get_reward(self) -> float | None:
        """Reward of the episode, after its end; None: only the rewards of the config count."""

    def close(self) -> None:
        """Free what the episode holds, such as connections."""

    def get_metrics(self) -> Mapping[str, float]:
        """Further numbers of the episode, which are averaged and logged."""
        return {}


def signature_readers(function: Callable[..., Any]) -> ColumnReaders:
    """Columns that a function gets as keyword arguments."""
    parameters = inspect.signature(function).parameters
    get_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return ColumnReaders(frozenset(parameters), get_all)


RESERVED = frozenset(name for name in vars(Environment) if not name.startswith("_"))


@cache
def tool_names(cls: type) -> tuple[str, ...]:
    """Names of the tools of an environment class: public methods, except those of `Environment`."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    return tuple(name for name, _ in methods if not name.startswith("_") and name not in RESERVED)


def get_tools(environment: Environment) -> dict[str, Callable[..., Any]]:
    """Tools of an environment by name."""
    methods = dict(inspect.getmembers(environment, inspect.ismethod))
    return {name: methods[name] for name in tool_names(type(environment))}


def get_tool_schemas(environment: Environment) -> list[dict[str, Any]]:
    """JSON schemas of the tools. Raises UserError if a tool has no type hints or descriptions."""
    return [tool_schema(tool) for tool in get_tools(environment).values()]
