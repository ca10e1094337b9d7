"""The quickstart example: one minute of LoRA teaches the nano model tool calls, and distillation passes them on."""

from dataclasses import replace
from pathlib import Path

import pytest

from tunekit.cli import registry
from tunekit.config.load import load_config
from tunekit.evaluation.results import ModelResult
from tunekit.recipes import distill, evaluate, sft

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tools_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run that has learned tool calls."""
    run = str(tmp_path_factory.mktemp("skilled") / "run")
    sft.main(load_config(sft.SFTConfig, registry.find_config("nano/tools_lora"), [f"output_dir={run}"]))
    return run


def evaluate_tools(model: str, baseline: str) -> list[ModelResult]:
    """Results of both models on the held-out tool calls."""
    cfg = load_config(
        evaluate.EvaluateConfig, registry.find_config("nano/tools"), [f"model={model}", f"baseline={baseline}"]
    )
    return evaluate.main(replace(cfg, num_completions_to_print=1))


def test_nano_lora_learns_tool_calls(tools_run: str) -> None:
    before, after = evaluate_tools(tools_run, "tunekit/nano")
    assert len(before.answers) == 200
    assert before.num_correct < 20
    assert after.num_correct > 180


def test_distillation_recovers_the_skill_of_the_teacher(tools_run: str, tmp_path: Path) -> None:
    """With two thirds of the configured epochs."""
    out, teacher = f"output_dir={tmp_path}", f"teacher.model={tools_run}"
    distill.main(load_config(distill.DistillConfig, registry.find_config("nano/distill"), [out, teacher, "epochs=2"]))
    teacher_result, student_result = evaluate_tools(str(tmp_path), tools_run)
    assert student_result.num_correct >= 0.9 * teacher_result.num_correct > 160
