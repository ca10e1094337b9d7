"""What the quickstart promises: the nano lacks a skill, a minute of LoRA teaches it, and then it can teach another."""

from dataclasses import replace
from pathlib import Path

import pytest

from tunekit.cli import registry
from tunekit.config.load import load_config
from tunekit.evaluation.results import ModelResult
from tunekit.recipes import distill, evaluate, sft

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def skilled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that has learnt tool calls."""
    run = str(tmp_path_factory.mktemp("skilled") / "run")
    sft.main(load_config(sft.SFTConfig, registry.find_config("nano/tools_lora"), [f"output_dir={run}"]))
    return run


def asked(model: str, baseline: str) -> list[ModelResult]:
    """The held-out calls, answered by both."""
    cfg = load_config(
        evaluate.EvaluateConfig, registry.find_config("nano/tools"), [f"model={model}", f"baseline={baseline}"]
    )
    return evaluate.main(replace(cfg, num_completions_to_print=1))


def test_a_minute_of_lora_teaches_the_nano_tool_calls(skilled: str) -> None:
    before, after = asked(skilled, "tunekit/nano")
    assert len(before.answers) == 200
    assert before.num_correct < 20
    assert after.num_correct > 180


def test_a_student_recovers_the_skill_of_its_teacher(skilled: str, tmp_path: Path) -> None:
    """In two thirds of the time that its config takes."""
    out, teacher = f"output_dir={tmp_path}", f"teacher.model={skilled}"
    distill.main(load_config(distill.DistillConfig, registry.find_config("nano/distill"), [out, teacher, "epochs=2"]))
    wanted, found = asked(str(tmp_path), skilled)
    assert found.num_correct >= 0.9 * wanted.num_correct > 160
