"""`FILE.py:name` as the value of a key selects the kind with code of the user."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tunekit.cli import main as cli
from tunekit.cli import recipe_loader
from tunekit.config.dump import to_plain_config
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.config.schema import json_schema
from tunekit.config.user_code import load_attribute
from tunekit.environments.config import CustomEnvironmentConfig
from tunekit.rewards.answer_rewards import Length
from tunekit.rewards.user_function import UserFunction

BASE = "model: m\ndata: {source: s}\noutput_dir: o\n"
GRPO = recipe_loader.load_recipe("grpo").CONFIG


@pytest.mark.parametrize(("text", "overrides", "expected"), [
    ("rewards: f.py:score", (), (UserFunction("f.py:score"),)),
    ("rewards: [f.py:score, dir/g.py:other, {kind: length, max_tokens: 3}]", (),
     (UserFunction("f.py:score"), UserFunction("dir/g.py:other"), Length(max_tokens=3))),
    ("rewards: [{kind: length}]", ("rewards=f.py:score",), (UserFunction("f.py:score"),)),
    ("rewards: {kind: length}", ("rewards=f.py:score",), (UserFunction("f.py:score"),)),
    ("rewards: f.py:score", ("rewards.weight=0.5",), (UserFunction("f.py:score", weight=0.5),)),
])  # fmt: skip
def test_function_is_a_reward(text: str, overrides: tuple[str, ...], expected: tuple) -> None:
    config = load_config(GRPO, BASE + text, overrides)
    assert config.rewards == expected
    assert load_config(GRPO, to_plain_config(config)).rewards == expected


@pytest.mark.parametrize("overrides", [
    ("environment=e.py:Shop", "environment.max_turns=3"), ("environment.max_turns=3", "environment=e.py:Shop"),
])  # fmt: skip
def test_class_is_an_environment(overrides: tuple[str, ...]) -> None:
    config = load_config(GRPO, BASE + "environment: {kind: calculator, max_turns: 5}", overrides)
    assert config.environment == CustomEnvironmentConfig("e.py:Shop", max_turns=3)


@pytest.mark.parametrize("value", ["f.py", "f.py:1st", "module:score", "f.py:"])
def test_other_words_are_kinds(value: str) -> None:
    with pytest.raises(ConfigError, match="rewards: unknown kind|rewards: expected|Write f.py:NAME"):
        load_config(GRPO, BASE + "rewards: [{kind: length}]", [f"rewards={value}"])


def test_schema_accepts_references() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema(GRPO))
    config = {"model": "m", "data": {"source": "s"}, "output_dir": "o"}
    assert validator.is_valid(config | {"rewards": ["f.py:score"], "environment": "e.py:Shop"})
    assert not validator.is_valid(config | {"rewards": ["f.py"]})


@pytest.mark.parametrize(("content", "location"), [
    (None, "reward.py: cannot be imported: No such file"),
    ("x = 1\nimport no_such_module\n", "reward.py:2: cannot be imported: ModuleNotFoundError"),
    ("def score(:\n", "reward.py:1: cannot be imported: SyntaxError"),
])  # fmt: skip
def test_error_of_an_import_names_key_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str | None, location
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("reward.py").write_text(content)
    for key, override in (
        ("rewards.0.function", "rewards=reward.py:score"),
        ("environment.environment_factory", "environment=reward.py:Shop"),
    ):
        assert cli.main(["validate", "nano/grpo", override]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {key}: {location}") and message.count("\n") == 1


def test_edit_within_a_second_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytecode of Python is out of date if the size of the source or its time in whole seconds differs."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "reward.py"
    for value in (2, 4):
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert load_attribute(f"{path}:VALUE", "rewards") == value
    assert not list(tmp_path.glob("__pycache__"))


def test_threads_wait_until_a_file_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import time\ntime.sleep(0.2)\nVALUE = 3\n")
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(load_attribute, [f"{path}:VALUE"] * 4, ["rewards"] * 4)] == [3] * 4
