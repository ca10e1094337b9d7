"""The examples of docs/environments.md run: a reward function and an environment of the user."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.rollouts import make_rollout
from tunekit.environments.config import CustomEnvironmentConfig
from tunekit.environments.tool_calls import run_tool
from tunekit.rewards.base import check_rewards, score_rollouts
from tunekit.rewards.user_function import UserFunction

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\w+\.\w+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)


def test_reward_function(examples: None) -> None:
    reward = UserFunction("word_reward.py:count_words")
    check_rewards([reward], ["max_words"])
    rollouts = [make_rollout("a b c", max_words=4), make_rollout("a", max_words=None)]
    assert str(score_rollouts([reward], rollouts).flatten().tolist()) == "[0.75, nan]"


def test_environment(examples: None) -> None:
    config = CustomEnvironmentConfig("shop.py:Shop")
    config.check()
    shop = config.create()
    assert shop.reset(budget=10, item="tea", other=1) == " You have 10 coins."
    tools = {"price": shop.price, "buy": shop.buy}  # type: ignore[attr-defined]
    for name, result in (("price", "3"), ("buy", "7 coins left")):
        call = {"id": "0", "function": {"name": name, "arguments": {"item": "tea"}}}
        assert run_tool(tools, call, 1).content == result
    assert shop.get_reward() == 1


def test_episodes_are_sampled(workspace) -> None:
    for name, text in FILES.items():
        (workspace.folder / name).write_text(text)
    (workspace.folder / "shop.jsonl").write_text('{"prompt": "Buy tea.", "item": "tea", "budget": 10}\n')
    result = workspace.run_tune("run", "generate", "my_shop.yaml", "device=cpu")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (workspace.folder / "episodes.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["rewards"] == {"environment": 0.0} for row in rows)
    assert rows[0]["prompt"][-1]["content"] == "Buy tea. You have 10 coins."
