"""Environments as config choices, and the limits of their episodes."""

from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from tunekit.config.base_url import check_base_url
from tunekit.config.user_code import load_attribute
from tunekit.data.check_target import ColumnReaders
from tunekit.environments.base import Environment, get_tool_schemas, signature_readers
from tunekit.environments.calculator import Calculator
from tunekit.environments.grid_world import GridWorld, Observation
from tunekit.environments.json_answer import JsonAnswer
from tunekit.environments.key_value_lookup import KeyValueLookup
from tunekit.environments.openenv import CLIENT_ERRORS, RESET_COLUMNS, OpenEnvEnvironment
from tunekit.environments.python_tool import PythonTool
from tunekit.environments.sandbox import SandboxConfig, require_sandbox
from tunekit.errors import CaughtError, FieldError, UserError, check_range, describe_user_code_error
from tunekit.evaluation.answer_checks import AnswerChecks


@dataclass(frozen=True)
class EnvironmentConfig(ABC):
    """Limits of an episode, and how its environment is created."""

    kind: ClassVar[str]
    max_turns: int = field(default=16, kw_only=True)  # Answers of the model in an episode
    # Answers with tool calls in an episode; null: as many as max_turns
    max_tool_calling_iterations: int | None = field(default=None, kw_only=True)
    max_tool_calls_per_turn: int = field(default=8, kw_only=True)  # Calls in one answer; further ones are errors
    max_tool_result_tokens: int = field(default=512, kw_only=True)  # Longer results and observations are cut
    tool_timeout_seconds: float = field(default=30.0, kw_only=True)  # Longest time of a tool call
    num_workers: int = field(default=8, kw_only=True)  # Episodes whose tools run at the same time, on each rank

    def __post_init__(self) -> None:
        check_range(self, "max_turns", "max_tool_calls_per_turn", "max_tool_result_tokens", "num_workers", ge=1)
        if self.max_tool_calling_iterations is not None and self.max_tool_calling_iterations < 0:
            raise FieldError(
                "max_tool_calling_iterations", f"must be >= 0 or null, got {self.max_tool_calling_iterations}"
            )
        check_range(self, "tool_timeout_seconds", gt=0)

    @abstractmethod
    def create(self) -> Environment:
        """A new environment, for one episode."""

    @property
    def column_readers(self) -> ColumnReaders:
        """Columns of rows that `reset` reads."""
        with closing(self.create()) as environment:
            return signature_readers(environment.reset)._replace(get_all=False)

    def check(self, needs_reward: bool = False) -> None:
        """Raise UserError if no environment can be created, its tools have no schema, or it lacks a needed reward."""
        try:
            with closing(self.create()) as environment:
                get_tool_schemas(environment)
        except UserError as error:
            raise UserError(f"environment.{error}") from None
        if needs_reward and type(environment).get_reward is Environment.get_reward:
            problem = f"{type(environment).__name__} has no method get_reward, and the config has no rewards"
            raise UserError(f"environment: {problem}. Define get_reward, or set rewards.")


@dataclass(frozen=True)
class CalculatorConfig(EnvironmentConfig):
    """Arithmetic with a calculator as tool. Column `answer` has the expected number; reward 1 if the answer has it."""

    kind: ClassVar[str] = "calculator"

    def create(self) -> Environment:
        return Calculator()


@dataclass(frozen=True)
class KeyValueLookupConfig(EnvironmentConfig):
    """A chain of lookups in a table, one per turn. Columns: `table` (object), `key`, and `answer`, the last value."""

    kind: ClassVar[str] = "key_value_lookup"

    def create(self) -> Environment:
        return KeyValueLookup()


@dataclass(frozen=True)
class GridWorldConfig(EnvironmentConfig):
    """A walk on a grid, one move per turn. Column `grid` has its rows; S is the start, G the goal, # a wall."""

    kind: ClassVar[str] = "grid_world"
    # What the model reads: `map`: the rows of the grid; `text`: the way to the goal and the adjacent walls in words
    observation: Observation = "map"

    def create(self) -> Environment:
        return GridWorld(self.observation)


@dataclass(frozen=True)
class JsonAnswerConfig(EnvironmentConfig):
    """Answers that must follow a JSON Schema. An answer that does not gets the reason, and the model tries again.

    Column `answer`, if rows have it, has the expected value.
    """

    kind: ClassVar[str] = "json_answer"
    json_schema: str  # File with the JSON Schema, or tunekit/json_answer
    max_attempts: int = 1  # Answers until the episode ends

    @cached_property
    def validator(self) -> Any:
        return AnswerChecks(json_schema=self.json_schema).validator

    def create(self) -> Environment:
        return JsonAnswer(self.validator, self.max_attempts)


@dataclass(frozen=True)
class PythonConfig(EnvironmentConfig):
    """Python code as tool, in a locked-down process. Column `answer`: the number or text that the answer must have."""

    kind: ClassVar[str] = "python"
    sandbox: SandboxConfig = SandboxConfig()  # Limits of the process

    def create(self) -> Environment:
        return PythonTool(self.sandbox)

    def check(self, needs_reward: bool = False) -> None:
        super().check(needs_reward)
        require_sandbox()


@dataclass(frozen=True)
class CustomEnvironmentConfig(EnvironmentConfig):
    """An environment of yours: a class with `reset`, tools as public methods, and `get_reward`."""

    kind: ClassVar[str] = "custom"
    reference_key: ClassVar[str] = "environment_factory"
    environment_factory: str  # File and name of the class, such as `my_env.py:Shop`

    @cached_property
    def environment_class(self) -> type[Environment]:
        cls = load_attribute(self.environment_factory, "environment_factory")
        if not isinstance(cls, type):
            raise UserError(f"environment_factory: {self.environment_factory} is not a class. Name a class.")
        # A class that was written for TRL has no base class; the missing methods come from ours.
        return cls if issubclass(cls, Environment) else type(cls.__name__, (cls, Environment), {})

    @property
    def column_readers(self) -> ColumnReaders:
        reset = self.environment_class.reset
        return ColumnReaders() if reset is Environment.reset else signature_readers(reset)

    def create(self) -> Environment:
        cls = self.environment_class
        with CaughtError() as caught:
            return cls()
        assert caught.error is not None
        problem = f"{self.environment_factory}: {describe_user_code_error(caught.error)}"
        fix = "Fix the class, which is created without arguments."
        raise UserError(f"environment_factory: {problem}. {fix}") from caught.error


@dataclass(frozen=True)
class OpenEnvConfig(EnvironmentConfig):
    """An environment on an OpenEnv server. Each answer is an action; the observation is the next user message.

    Columns `seed` and `episode_id`, if rows have them, are passed to `reset`.
    """

    kind: ClassVar[str] = "openenv"
    base_url: str  # Address of the server, such as `http://localhost:8000`
    action_field: str | None = None  # Field of the action that gets the answer as text; null: the answer is JSON
    observation_field: str | None = None  # Field of the observation that is shown; null: all of it as JSON

    def __post_init__(self) -> None:
        super().__post_init__()
        check_base_url(self.base_url, ("http", "https", "ws", "wss"))

    @property
    def column_readers(self) -> ColumnReaders:
        return ColumnReaders(frozenset(RESET_COLUMNS))

    def create(self) -> Environment:
        return OpenEnvEnvironment(self.base_url, self.action_field, self.observation_field, self.tool_timeout_seconds)

    def check(self, needs_reward: bool = False) -> None:
        """Also raise UserError if there is no server."""
        super().check(needs_reward)
        with closing(self.create()) as environment:
            try:
                environment.reset()
            except CLIENT_ERRORS as error:
                raise UserError(f"environment.base_url: {self.base_url}: {error}. Check the server.") from None


EnvironmentChoice = (
    CalculatorConfig
    | KeyValueLookupConfig
    | GridWorldConfig
    | JsonAnswerConfig
    | PythonConfig
    | CustomEnvironmentConfig
    | OpenEnvConfig
)
