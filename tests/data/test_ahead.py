"""The next step is made while this one trains: in order, with its own errors, and without a thread that is left."""

import threading
import time
from typing import Any

import pytest
import torch

from tunekit.data.steps.ahead import Ahead
from tunekit.errors import UserError

CPU = torch.device("cpu")


class Steps:
    """Each step is its number, made in some time; one of them fails."""

    def __init__(self, seconds: float = 0.0, fault: dict[int, BaseException] | None = None) -> None:
        self.seconds, self.fault, self.closed = seconds, fault or {}, False
        self.made: list[tuple[int, str]] = []

    def __getitem__(self, step: int) -> list[Any]:
        time.sleep(self.seconds)
        if step in self.fault:
            raise self.fault[step]
        self.made.append((step, threading.current_thread().name))
        return [step]

    def state(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, state: dict[str, Any]) -> None:
        self.restored = state

    def close(self) -> None:
        self.closed = True


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tunekit-data")]


def test_steps_come_in_turn_each_made_once_by_a_thread() -> None:
    data = Steps()
    with Ahead(data, CPU).over(3, 9) as ahead:
        assert [ahead.take() for _ in range(6)] == [[step] for step in range(3, 9)]
    assert [step for step, _ in data.made] == list(range(3, 9))
    assert all(name.startswith("tunekit-data") for _, name in data.made)
    assert data.closed
    assert not threads()


def test_a_step_is_not_waited_for_where_training_takes_longer() -> None:
    waits = []
    with Ahead(Steps(0.05), CPU).over(0, 6) as ahead:
        for _ in range(6):
            ahead.take()
            waits.append(ahead.wait)
            time.sleep(0.15)
    assert waits[0] > 0.04, "nothing trains before the first"
    assert sum(waits[1:]) < 0.15


def test_the_state_is_that_of_the_steps_that_were_taken() -> None:
    data = Steps()
    with Ahead(data, CPU).over(0, 5) as ahead:
        ahead.take()
        ahead.take()
        while len(data.made) < 3:  # one is ahead
            time.sleep(0.01)
        assert ahead.state_dict() == {"step": 2}
    ahead.load_state_dict({"step": 2})
    assert data.restored == {"step": 2}


@pytest.mark.parametrize("fault", [UserError("rows.jsonl:3: broken"), KeyError("x"), KeyboardInterrupt()])
def test_an_error_comes_as_itself_where_its_step_is_asked_for(fault: BaseException) -> None:
    data, taken = Steps(fault={2: fault}), []
    with pytest.raises(type(fault)) as told, Ahead(data, CPU).over(0, 5) as ahead:
        for _ in range(5):
            taken.append(ahead.take())
    assert told.value is fault
    assert taken == [[0], [1]]
    assert data.closed
    assert not threads()


@pytest.mark.parametrize("fault", [UserError("training"), KeyboardInterrupt()])
def test_no_thread_is_left_when_training_fails(fault: BaseException) -> None:
    with pytest.raises(type(fault)), Ahead(Steps(0.02), CPU).over(0, 5) as ahead:
        ahead.take()
        raise fault
    assert not threads()


def test_a_run_that_has_ended_wants_no_step() -> None:
    data = Steps()
    with Ahead(data, CPU).over(5, 5):
        pass
    assert data.made == []
