"""The quickstart example: LoRA teaches the nano model tool calls, and distillation passes them on."""

from dataclasses import replace
from pathlib import Path

import pytest

from tunekit.cli import registry
from tunekit.config.load import load_config
from tunekit.evaluation.results import ModelResult
from tunekit.recipes import distill, evaluate, sft

pytestmark = pytest.mark.slow
LIMIT = 100  # of the 200 held-out rows
# One epoch in smaller steps, without evaluation. Two seeds gave 90% and 92% of correct answers.
ONE_EPOCH = ("epochs=1", "global_batch_size=16", "eval_data=null")


@pytest.fixture(scope="module")
def tools_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run that has learned tool calls."""
    run = str(tmp_path_factory.mktemp("skilled") / "run")
    sft.main(load_config(sft.SFTConfig, registry.find_config("nano/tools_lora"), [f"output_dir={run}", *ONE_EPOCH]))
    return run


def evaluate_tools(model: str, *overrides: str) -> list[ModelResult]:
    """Results on the held-out tool calls."""
    overrides = (f"model={model}", f"limit={LIMIT}", *overrides)
    cfg = load_config(evaluate.EvaluateConfig, registry.find_config("nano/tools"), [*overrides])
    return evaluate.main(replace(cfg, num_completions_to_print=1))


@pytest.fixture(scope="module")
def before_and_after(tools_run: str) -> list[ModelResult]:
    """Results of the nano model and of the run."""
    return evaluate_tools(tools_run)


def test_nano_lora_learns_tool_calls(before_and_after: list[ModelResult]) -> None:
    before, after = before_and_after
    assert len(before.answers) == LIMIT
    assert before.num_correct < 0.1 * LIMIT
    assert after.num_correct > 0.75 * LIMIT


def test_distillation_recovers_the_skill_of_the_teacher(
    tools_run: str, before_and_after: list[ModelResult], tmp_path: Path
) -> None:
    """Most of it, in a fraction of the configured epochs."""
    out, teacher = f"output_dir={tmp_path}", f"teacher.model={tools_run}"
    shorter = ("epochs=1", "data.split=train[:1200]", "global_batch_size=8", "micro_batch_size=8", "eval_data=null")
    distill.main(load_config(distill.DistillConfig, registry.find_config("nano/distill"), [out, teacher, *shorter]))
    (student,) = evaluate_tools(str(tmp_path), "baseline=null")
    assert student.num_correct >= 0.75 * before_and_after[1].num_correct > 0.55 * LIMIT
