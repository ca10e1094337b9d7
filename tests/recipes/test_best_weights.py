"""The result has the weights of the best evaluation, as of a run that ends there, also after kills and rollbacks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.best_weights import run_twice
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_runs import Workspace
from tests.helpers.training_methods import METHODS, Case, make_config, write_rows
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.training.step_guard import StepGuard

# The loss on held-out rows falls, and rises again. The schedule of a shorter run is the same.
OVERFIT = ("optimizer={kind: sgd, lr: 1.0}", "lr_scheduler=constant", "max_steps=16", "eval_every=2", "save_every=5")
RUN = ("run", "sft", "sft.yaml", *OVERFIT, "load_best_model_at_end=true")
KILL = """
from tunekit.checkpoint.training_state import Checkpointer
method = Checkpointer.{method}
def killed(state, step):
    method(state, step)
    state.wait()
    if {method!r} == "load_weights" or step == 15:
        os.kill(os.getpid(), 9)
Checkpointer.{method} = killed
"""


def run_ok(workspace: Workspace, *args: str) -> str:
    result = workspace.run_tune(*args)
    assert result.code == 0, result.err
    return result.err


def eval_losses(out: str) -> dict[int, float]:
    """Loss of each evaluation by step."""
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line and line["step"]}


def saved_steps(out: str) -> list[int]:
    return sorted(int(path.name) for path in Path(out, "state").iterdir())


def same_weights(workspace: Workspace, first: str, second: str) -> bool:
    a, b = workspace.tensors(first), workspace.tensors(second)
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_result_has_the_weights_of_the_best_step(adapter: str, workspace: Workspace) -> None:
    args = (*RUN, f"adapter={adapter}", *["optimizer={kind: adamw, lr: 0.05}"] * (adapter == "lora"))
    log = run_ok(workspace, *args)
    losses = eval_losses("out")
    best = min(losses, key=lambda step: losses[step])
    assert 2 <= best < 16 and losses[16] > losses[best], losses
    assert saved_steps("out") == [best, 16], "the best state is kept next to the newest one"
    assert f"best eval/loss: {losses[best]:.6g} after step {best}. The result has" in log
    last = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == best and last["verify/max_logit_diff"] == 0
    card = Path("out/final/README.md").read_text()
    assert f"16; the weights are those after step {best}, the best evaluation" in card
    assert f"| after step {best} |" in card and f"{losses[best]:.4f} |" in card
    run_ok(workspace, *args, f"max_steps={best}", "load_best_model_at_end=false", "output_dir=short")
    assert same_weights(workspace, "out", "short")
    run_ok(workspace, *args, "load_best_model_at_end=false", "output_dir=last")
    assert not same_weights(workspace, "out", "last") and saved_steps("last") == [16]


@pytest.mark.parametrize("method", ["save", "load_weights"])
@pytest.mark.parametrize("save_async", [False, True])
def test_killed_run_ends_with_the_same_weights(method: str, save_async: bool, workspace: Workspace) -> None:
    """Killed between the best step and the end, and before `final/` is written."""
    args = (*RUN, f"async_save={str(save_async).lower()}")
    run_ok(workspace, *args)
    process = workspace.start(*args, "output_dir=killed", setup=KILL.format(method=method))
    process.join()
    assert process.exitcode == -9 and not Path("killed/final").exists()
    assert "resuming from step" in run_ok(workspace, *args, "output_dir=killed")
    assert workspace.is_same_run("out", "killed") and saved_steps("out") == saved_steps("killed")


def test_early_stopping_ends_with_the_best_weights(workspace: Workspace) -> None:
    args = ("run", "sft", "sft.yaml", *OVERFIT, "early_stopping_patience=2", "max_steps=40")
    log = run_ok(workspace, *args)
    losses = eval_losses("out")
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 4
    assert f"early stopping after step {best + 4}: no lower eval/loss in 2 evaluations" in log
    run_ok(workspace, "run", "sft", "sft.yaml", *OVERFIT, f"max_steps={best}", "output_dir=short")
    assert same_weights(workspace, "out", "short")


@pytest.mark.parametrize("method", ["sft", "dpo", "reward", "embed", "distill"])
def test_all_recipes_keep_the_best_weights(
    method: str, workspace: Workspace, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With the largest loss as the best, the best step is an early one."""
    write_rows(tmp_path)
    if method == "distill":
        make_model(tmp_path / "teacher", num_hidden_layers=1)
    config = make_config(Case(method, "lora", False), tmp_path, workspace.model, tmp_path / "out")
    data = next(line for line in config.splitlines() if line.startswith("data:"))
    Path("run.yaml").write_text(f"{config}eval_{data}\neval_every: 1\n")
    args = ("run", METHODS[method][0], "run.yaml", "optimizer={kind: sgd, lr: 0.01}", "data_checks=warn")
    run_ok(workspace, *args, "load_best_model_at_end=true", "greater_is_better=true")
    losses = eval_losses("out")
    best = max(losses, key=lambda step: losses[step])
    assert best < 3 and saved_steps("out") == [best, 3]
    run_ok(workspace, *args, f"max_steps={best}", "output_dir=short")
    assert same_weights(workspace, "out", "short")


def test_best_step_survives_a_rollback(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run rolls back to the newest state, which is not the best one. The largest loss is the best, an early one."""
    accepts = StepGuard.accepts

    def spike(guard: StepGuard, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        is_first = step == 12 and guard.num_rollbacks == 0
        return accepts(guard, step, loss, grad_norm * (1e9 if is_first else 1))

    monkeypatch.setattr(StepGuard, "accepts", spike)
    args = (*RUN, "step_guard={spike_factor: 1e6, on_spike: rollback, spike_window: 8}", "greater_is_better=true")
    log = run_ok(workspace, *args, "lr_scheduler=linear", "optimizer.lr=0.1")
    losses = eval_losses("out")
    best = max(losses, key=lambda step: losses[step])
    assert "Rolled back to step 10" in log and best < 10 and saved_steps("out") == [best, 16]
    assert f"after step {best}. The result has" in log
    monkeypatch.undo()
    monkeypatch.chdir(workspace.folder)
    stop = (*args, "lr_scheduler=linear", "optimizer.lr=0.1", "output_dir=plain")
    run_ok(workspace, *stop)
    assert same_weights(workspace, "out", "plain"), "the rollback did not change the best step"


def test_missing_best_state_is_an_error(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Checkpointer.load_weights

    def delete_and_load(state: Checkpointer, step: int) -> None:
        next(Path("out/state", f"{step:08d}").glob("*.distcp")).unlink()
        load(state, step)

    monkeypatch.setattr(Checkpointer, "load_weights", delete_and_load)
    result = workspace.run_tune(*RUN)
    assert result.code == 2 and "has the best weights, or set load_best_model_at_end=false" in result.err
    monkeypatch.undo()
    monkeypatch.chdir(workspace.folder)
    assert "whose weights" not in run_ok(workspace, *RUN, "load_best_model_at_end=false")


def test_unknown_metric_is_an_error_before_training(workspace: Workspace) -> None:
    result = workspace.run_tune(*RUN, "metric_for_best_model=accuracy")
    assert result.code == 2
    assert "metric_for_best_model: the evaluation has no metric 'accuracy'. Use one of loss." in result.err


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_end_with_the_best_weights(workspace: Workspace) -> None:
    best = [*OVERFIT, "load_best_model_at_end=true"]
    run_ok(workspace, *RUN, "output_dir=single")
    losses = eval_losses("single")
    step = min(losses, key=lambda step: losses[step])
    folder = workspace.folder
    short = [*OVERFIT, f"max_steps={step}", f"output_dir={folder}/short"]
    rows = {name: str(folder / name) for name in ("rows.jsonl", "held.jsonl")}
    text = Path("sft.yaml").read_text()
    for name, path in rows.items():
        text = text.replace(name, path)
    Path("two.yaml").write_text(text)
    run_ranks(2, run_twice, folder / "two.yaml", [*best, f"output_dir={folder}/out"], short)
    assert same_weights(workspace, "out", "short") and saved_steps("out") == [step, 16]
