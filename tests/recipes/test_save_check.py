"""Results that cannot be saved are refused before the first step of a run, which can be repeated."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.recipe_runs import Workspace
from tests.helpers.training_methods import METHODS, Case, make_config, write_rows
from tunekit import system
from tunekit.training.run_context import Due, RunContext

RUN = ("run", "sft", "sft.yaml", "data_checks=warn")
FUSED = "{kind: lora, rank: 2, target_modules: [q_proj], modules_to_save: [k_proj]}"
RECIPES = ("sft", "dpo", "reward", "embed", "grpo", "ppo", "distill")  # a method of each recipe


class Usage(NamedTuple):
    """Size of a disk in bytes."""

    total: int
    used: int
    free: int


@pytest.fixture
def set_free_space(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Function that sets the free bytes that the system reports."""
    return lambda size: monkeypatch.setattr(system.shutil, "disk_usage", lambda _: Usage(2**50, 0, size))


@pytest.fixture(scope="module")
def fused_model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint whose q_proj and k_proj are one tensor."""
    return make_model(tmp_path_factory.mktemp("fused"), model_type="phi3")


@pytest.mark.parametrize("method", RECIPES)
def test_every_recipe_refuses_what_it_cannot_save(workspace: Workspace, fused_model: Path, method: str) -> None:
    write_rows(workspace.folder)
    (workspace.folder / "teacher").mkdir()
    shutil.copytree(fused_model, "teacher/model")
    config = make_config(Case(method, "full", False), workspace.folder, fused_model, Path("out"))
    Path("run.yaml").write_text(config.replace("adapter: none", f"adapter: {FUSED}"))
    result = workspace.run_tune("run", METHODS[method][0], "run.yaml", "data_checks=warn")
    assert "adapter.modules_to_save: " in result.error
    assert {path.name for path in Path("out").iterdir()} <= {"config.yaml", ".lock"}


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_small_disk_is_refused_before_training(
    workspace: Workspace, set_free_space: Callable[[int], None], adapter: str
) -> None:
    set_free_space(5000)
    result = workspace.run_tune(*RUN, f"adapter={adapter}")
    assert result.error.startswith("error: output_dir: ")
    assert "out (" in result.error
    assert "iB needed, 4.88 KiB free in " in result.error
    assert {path.name for path in Path("out").iterdir()} <= {"config.yaml", ".lock"}


def test_run_resumes_after_its_disk_was_full(workspace: Workspace, set_free_space: Callable[[int], None]) -> None:
    """One state exists. The next one replaces it, so that less space is needed than at the start."""
    args = (*RUN, "save_every=3")
    assert workspace.run_tune(*args, "output_dir=unbroken").code == 0
    workspace.kill_after(3, *args)
    (state,) = Path("out/state").iterdir()
    size = sum(file.stat().st_size for file in state.iterdir())
    set_free_space(size // 2)
    assert workspace.run_tune(*args).code == 2
    assert [*Path("out/state").iterdir()] == [state]
    set_free_space(size + 2**21)
    assert workspace.run_tune(*args).code == 0
    assert workspace.is_same_run("out", "unbroken")


def test_result_is_saved_without_the_data(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training rows are deleted during the run. The model card says nothing about them."""
    due_after = RunContext.due_after

    def delete_rows(run: RunContext, step: int, num_steps: int) -> Due:
        Path("rows.jsonl").unlink(missing_ok=True)
        return due_after(run, step, num_steps)

    monkeypatch.setattr(RunContext, "due_after", delete_rows)
    result = workspace.run_tune(*RUN)
    assert result.code == 0
    assert "warning: out/final/README.md" in result.err
    assert "rows.jsonl" not in Path("out/final/README.md").read_text()
