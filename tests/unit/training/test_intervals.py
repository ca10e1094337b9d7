"""Intervals in steps, fractions of a run and epochs: steps as in transformers, ends of epochs as of the data."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainerState

from tunekit.training.intervals import Interval, StepPlan, interval_error

ENDS = (3, 7, 8, 12, 16)  # steps after which epochs end: packed rows differ from epoch to epoch


def make_plan(num_steps: int) -> StepPlan:
    data: Any = SimpleNamespace(num_steps=lambda epochs: ENDS[epochs - 1] if epochs else 0)
    return StepPlan(num_steps, data)


@pytest.mark.parametrize("num_steps", [1, 3, 10, 16])
@pytest.mark.parametrize("every", [1, 3, 500, 0.1, 0.25, 1 / 3, 0.999])
def test_steps_are_those_of_transformers(every: float, num_steps: int) -> None:
    state = TrainerState()
    state.compute_steps(cast(Any, SimpleNamespace(logging_steps=1, eval_steps=every, save_steps=every)), num_steps)
    plan = make_plan(num_steps)
    assert [plan.is_due(every, step) for step in range(num_steps + 1)] == [
        step % state.eval_steps == 0 for step in range(num_steps + 1)
    ]


def test_epochs_end_where_their_data_ends() -> None:
    assert [step for step in range(17) if make_plan(16).is_due("epoch", step)] == [0, *ENDS]


@pytest.mark.parametrize("every", [1, 2, 5, 100, 0.3, "epoch"])
def test_largest_gap(every: Interval) -> None:
    plan = make_plan(12)
    due = [step for step in range(13) if plan.is_due(every, step)]
    due += [12] * (due == [0])  # an interval that never ends in the run
    assert plan.max_gap(every) == max(b - a for a, b in zip(due, due[1:], strict=False))


@pytest.mark.parametrize("every", [0, -1, 1.5, -0.1, 0.0, float("inf"), float("nan")])
def test_invalid_intervals_name_their_key(every: float) -> None:
    error = interval_error("eval_every", every, False)
    assert error is not None and error.field == "eval_every"


def test_epochs_of_a_stream_are_unknown() -> None:
    assert interval_error("save_every", "epoch", True) is not None
    assert interval_error("save_every", "epoch", False) is None
    assert interval_error("save_every", 0.5, True) is None
