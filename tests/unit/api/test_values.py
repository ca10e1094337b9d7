"""Values of config keys from Python become plain data, and functions become names that this process finds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tunekit.api.values import PlainValues
from tunekit.config.load import load_config
from tunekit.config.overrides import KeywordValues
from tunekit.config.user_code import load_attribute
from tunekit.errors import UserError
from tunekit.recipes.grpo import GRPOConfig

BASE = {"model": "tunekit/nano", "data": {"source": "rows.jsonl"}, "output_dir": "out"}


def score(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def make_score(value: float) -> Any:
    def score(completions: list[Any], **columns: Any) -> list[float]:
        return [value for _ in completions]

    return score


def test_values_are_plain() -> None:
    values = {"a": Path("x/y"), "b": (1, np.int64(2)), "c": {"d": torch.bfloat16}, "e": np.arange(2), "f": None}
    plain = {"a": "x/y", "b": [1, 2], "c": {"d": "bf16"}, "e": [0, 1], "f": None}
    assert PlainValues("run(...)")(values) == plain


@pytest.mark.parametrize("rewards", [score, [score], [{"kind": "function", "function": score}]])
def test_functions_are_rewards(rewards: Any) -> None:
    values = PlainValues("run(...)")(BASE | {"rewards": rewards})
    (reward,) = load_config(GRPOConfig, None, keywords=KeywordValues("run(...)", values)).rewards
    assert reward.callable is score and reward.name == "score"


def test_functions_of_the_same_name_have_different_names() -> None:
    values = PlainValues("run(...)")({"rewards": [make_score(1), make_score(2), score, score]})
    functions = [load_attribute(name, "function") for name in values["rewards"]]
    assert [function([0])[0] for function in functions] == [1, 2, 1.0, 1.0] and functions[2] is functions[3] is score


def test_functions_need_a_name() -> None:
    with pytest.raises(UserError, match="rewards"):
        PlainValues("run(...)")({"rewards": lambda **columns: []})


def test_functions_of_another_session_are_an_error() -> None:
    with pytest.raises(UserError, match="Python session"):
        load_attribute("__main__:count", "function")
