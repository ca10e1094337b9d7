"""Datasets of the environments: demonstrations earn the full reward."""

from itertools import chain, islice
from random import Random

import pytest

from scripts.nano.environments import DEMONSTRATED, TASKS
from tunekit.environments.base import Environment, get_tools
from tunekit.environments.config import (
    CalculatorConfig,
    EnvironmentConfig,
    GridWorldConfig,
    JsonAnswerConfig,
    KeyValueLookupConfig,
    PythonConfig,
)

CONFIGS: dict[str, EnvironmentConfig] = {
    "calculator": CalculatorConfig(),
    "grid_world": GridWorldConfig(observation="text"),
    "json_answer": JsonAnswerConfig("tunekit/json_answer"),
    "key_value_lookup": KeyValueLookupConfig(),
    "python": PythonConfig(),
}


def replay(environment: Environment, messages: list[dict]) -> None:
    """Repeat what the assistant does, and compare the observations."""
    tools = get_tools(environment)
    observation, tool_result = messages[0]["content"], None
    for message in messages:
        if message["role"] == "user":
            assert message["content"] == observation
        elif message["role"] == "tool":
            assert message["content"] == tool_result
        elif "tool_calls" in message:
            function = message["tool_calls"][0]["function"]
            tool_result = tools[function["name"]](**function["arguments"])
        else:
            observation = environment.step(message["content"])
    assert observation is None


@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_earn_the_reward(name: str) -> None:
    iter_rows, solve = TASKS[name]
    rows = iter_rows(Random(1)), DEMONSTRATED.get(name, iter_rows)(Random(2))
    for row in chain.from_iterable(islice(part, 5) for part in rows):
        environment, messages = CONFIGS[name].create(), solve(row)["messages"]
        assert messages[0]["content"] == row["prompt"] + (environment.reset(**row) or "")
        replay(environment, messages)
        assert environment.get_reward() == 1
