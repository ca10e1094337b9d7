"""Metrics and the guard read one step late, as on a GPU: the same lines, states and errors as on the CPU."""

import pytest
import torch

from tests.recipes.test_guarded import plant
from tests.recipes.test_resume import stop_after
from tunekit.loggers import metric_logger
from tunekit.training.step_guard import StepGuard

RUN = ("run", "sft", "sft.yaml", "max_steps=7", "save_every=3")


def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is one on which the host runs ahead."""
    create = StepGuard.__init__
    monkeypatch.setattr(metric_logger, "read_lag", lambda device: 1)
    monkeypatch.setattr(StepGuard, "__init__", lambda watch, rule, device: create(watch, rule, torch.device("meta")))


@pytest.mark.parametrize(
    "words",
    [
        ("eval_every=2", "log_every=1"),
        ("eval_data=null", "log_every=2"),
        ("optimizer.lr=0.5", "max_steps=20", "eval_every=1", "early_stopping_patience=2"),
        ("forgetting={data: {source: held.jsonl, max_length: 64}, eval_every: 2}", "log_every=3"),
    ],
    ids=["validation", "every second step", "patience", "forgetting"],
)
def test_lines_are_the_same(work, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    assert work.tune(*RUN, *words, "output_dir=near").code == 0
    read_late(monkeypatch)
    done = work.tune(*RUN, *words, "output_dir=far")
    assert done.code == 0, done.err
    assert work.same("far", "near")


@pytest.mark.parametrize("log_every", [1, 2, 5])
@pytest.mark.parametrize("bad", [3, 6])
def test_a_loss_that_is_not_finite_ends_both_at_the_same_step(
    work, monkeypatch: pytest.MonkeyPatch, bad: int, log_every: int
) -> None:
    """Counted from 0; the last step of the run too."""
    words = (*RUN, "eval_data=null", f"log_every={log_every}", "save_every=2")
    plant(monkeypatch, float("nan"), bad)
    near = work.tune(*words, "output_dir=near")
    read_late(monkeypatch)
    far = work.tune(*words, "output_dir=far")
    assert near.code == far.code == 2
    for done in (near, far):
        assert f"step {bad + 1}: the loss is nan" in done.err
    assert work.numbers("far") == work.numbers("near")
    assert [line["step"] for line in work.numbers("far")] == list(range(log_every, bad + 1, log_every))
    states = [{path.name for path in (work.folder / out / "state").iterdir()} for out in ("far", "near")]
    assert states[0] == states[1]


def test_a_run_that_is_stopped_goes_on(work, monkeypatch: pytest.MonkeyPatch) -> None:
    assert work.tune(*RUN, "output_dir=near").code == 0
    read_late(monkeypatch)
    with monkeypatch.context() as stops:
        stop_after(stops, 3)
        assert work.tune(*RUN, "output_dir=far").code == 143
    assert [line["step"] for line in work.numbers("far") if "loss" in line] == [1, 2, 3]
    assert work.tune(*RUN, "output_dir=far").code == 0
    assert work.same("far", "near")


def test_a_way_back_leaves_the_same_lines(work, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        *RUN,
        "max_steps=14",
        "eval_data=null",
        "step_guard.spike_window=8",
        "step_guard.spike_factor=20",
        "step_guard.on_spike=rollback",
    )
    plant(monkeypatch, 1000.0, 10)
    assert work.tune(*words, "output_dir=near").code == 0
    read_late(monkeypatch)
    assert work.tune(*words, "output_dir=far").code == 0
    assert work.same("far", "near")
