"""Datasets of the environments: demonstrations earn the full reward."""

import json
from collections import Counter
from itertools import chain, islice, product
from random import Random

import pytest

from scripts.nano.environments import (
    DEMONSTRATION_GENERATORS,
    GENERATORS,
    NUM_MOVES,
    SPLIT_SIZES,
    demonstrate_grid_walk,
)
from tunekit import assets
from tunekit.cli import registry
from tunekit.config.load import load_config
from tunekit.environments.base import Environment, get_tools
from tunekit.environments.config import (
    CalculatorConfig,
    EnvironmentConfig,
    GridWorldConfig,
    JsonAnswerConfig,
    KeyValueLookupConfig,
    PythonConfig,
)
from tunekit.environments.grid_world import MOVES
from tunekit.recipes.grpo import GRPOConfig

CONFIGS: dict[str, EnvironmentConfig] = {
    "calculator": CalculatorConfig(),
    "grid_world": GridWorldConfig(observation="text"),
    "json_answer": JsonAnswerConfig("tunekit/json_answer"),
    "key_value_lookup": KeyValueLookupConfig(),
    "python": PythonConfig(),
}


def replay_messages(environment: Environment, messages: list[dict]) -> None:
    """Repeat the actions of the assistant, and compare the observations and tool results."""
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


@pytest.mark.parametrize("name", GENERATORS)
def test_demonstrations_earn_the_reward(name: str) -> None:
    iter_rows, demonstrate = GENERATORS[name]
    row_iterators = iter_rows(Random(1)), DEMONSTRATION_GENERATORS.get(name, iter_rows)(Random(2))
    for row in chain.from_iterable(islice(iterator, 5) for iterator in row_iterators):
        environment, messages = CONFIGS[name].create(), demonstrate(row)["messages"]
        assert messages[0]["content"] == row["prompt"] + (environment.reset(**row) or "")
        replay_messages(environment, messages)
        assert environment.get_reward() == 1


def test_walks_on_bundled_grids_fit_the_config() -> None:
    config = load_config(GRPOConfig, registry.list_configs()["nano/grpo_grid_world"]).environment
    assert config is not None
    lines = [
        line for split in ("train", "test") for line in (assets.DATA["tunekit/grid_world"] / f"{split}.jsonl").open()
    ]
    assert len(lines) == sum(SPLIT_SIZES.values())
    for line, choice in product(lines, (0, 1)):
        row = json.loads(line)
        messages = demonstrate_grid_walk({**row, "choice": choice})["messages"]
        assert len(messages) == 2 * config.max_turns == 2 * NUM_MOVES
        environment = config.create()
        assert messages[0]["content"] == row["prompt"] + str(environment.reset(**row))
        replay_messages(environment, messages)


def test_demonstrations_of_walks_show_each_direction_and_both_choices() -> None:
    rows = list(islice(DEMONSTRATION_GENERATORS["grid_world"](Random(0)), 12))
    assert len({row["grid"] for row in rows}) == 8
    firsts = Counter((row["grid"], demonstrate_grid_walk(row)["messages"][1]["content"]) for row in rows)
    assert Counter(move for _, move in firsts) == dict.fromkeys(MOVES, 3) and len(firsts) == 12
