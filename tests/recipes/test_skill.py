"""What the quickstart promises: the nano lacks the skill, and a minute of LoRA teaches it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tunekit import catalog
from tunekit.config.load import load
from tunekit.recipes import evaluate, sft


@pytest.mark.slow
def test_a_minute_of_lora_teaches_the_nano_tool_calls(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    sft.main(load(sft.SFT, catalog.config("nano/tools_lora"), [f"out={run}"]))
    asked = load(evaluate.Evaluate, catalog.config("nano/tools"), [f"model={run}"])
    before, after = evaluate.main(replace(asked, examples=1))
    assert len(before.answers) == 200
    assert before.right < 20
    assert after.right > 180
