"""Metrics and the step guard with values that are read one step late, as on a GPU: same lines, states and errors as
on the CPU.
"""

import pytest

from tests.recipes.test_resume import stop_after
from tests.recipes.test_step_guard import scale_loss
from tunekit.loggers import metric_logger
from tunekit.training.step_guard import StepGuard

RUN = ("run", "sft", "sft.yaml", "max_steps=7", "save_every=3")


def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read device values one step late."""
    create = StepGuard.__init__
    monkeypatch.setattr(metric_logger, "read_lag", lambda device: 1)

    def create_with_late_reads(guard, config, dist, prefetcher):
        create(guard, config, dist, prefetcher)
        guard.reads_now = config.can_drop_steps

    monkeypatch.setattr(StepGuard, "__init__", create_with_late_reads)


@pytest.mark.parametrize(
    "args",
    [
        ("eval_every=2", "log_every=1"),
        ("eval_data=null", "log_every=2"),
        ("optimizer.lr=0.5", "max_steps=20", "eval_every=1", "early_stopping_patience=2"),
        ("forgetting={data: {source: held.jsonl, max_length: 64}, eval_every: 2}", "log_every=3"),
    ],
    ids=["validation", "every second step", "patience", "forgetting"],
)
def test_metric_lines_are_the_same(workspace, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    assert workspace.run_tune(*RUN, *args, "output_dir=near").code == 0
    read_late(monkeypatch)
    result = workspace.run_tune(*RUN, *args, "output_dir=far")
    assert result.code == 0, result.err
    assert workspace.is_same_run("far", "near")


@pytest.mark.parametrize("log_every", [1, 2, 5])
@pytest.mark.parametrize("bad", [3, 6])
def test_nan_stops_at_the_same_step(workspace, monkeypatch: pytest.MonkeyPatch, bad: int, log_every: int) -> None:
    """Steps count from 0; the last step is included."""
    args = (*RUN, "eval_data=null", f"log_every={log_every}", "save_every=2")
    scale_loss(monkeypatch, float("nan"), bad)
    on_time = workspace.run_tune(*args, "output_dir=near")
    read_late(monkeypatch)
    late = workspace.run_tune(*args, "output_dir=far")
    assert on_time.code == late.code == 2
    for result in (on_time, late):
        assert f"step {bad + 1}: loss is nan" in result.err
    assert workspace.deterministic_metrics("far") == workspace.deterministic_metrics("near")
    assert [line["step"] for line in workspace.deterministic_metrics("far")] == list(
        range(log_every, bad + 1, log_every)
    )
    states = [{path.name for path in (workspace.folder / out / "state").iterdir()} for out in ("far", "near")]
    assert states[0] == states[1]


def test_stopped_run_resumes(workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workspace.run_tune(*RUN, "output_dir=near").code == 0
    read_late(monkeypatch)
    with monkeypatch.context() as stops:
        stop_after(stops, 3)
        assert workspace.run_tune(*RUN, "output_dir=far").code == 143
    assert [line["step"] for line in workspace.deterministic_metrics("far") if "loss" in line] == [1, 2, 3]
    assert workspace.run_tune(*RUN, "output_dir=far").code == 0
    assert workspace.is_same_run("far", "near")


def test_rollback_leaves_the_same_lines(workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (
        *RUN,
        "max_steps=14",
        "eval_data=null",
        "step_guard.spike_window=8",
        "step_guard.spike_factor=20",
        "step_guard.on_spike=rollback",
    )
    scale_loss(monkeypatch, 1000.0, 10)
    assert workspace.run_tune(*args, "output_dir=near").code == 0
    read_late(monkeypatch)
    assert workspace.run_tune(*args, "output_dir=far").code == 0
    assert workspace.is_same_run("far", "near")
