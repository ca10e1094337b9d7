"""The next step is made while this one trains: in order, with its own errors, and without a thread that is left."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.waiting import LIMIT, until
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.errors import UserError

CPU = torch.device("cpu")


class Steps:
    """Each step is its number, made once `may` is set; one of them fails."""

    def __init__(self, fault: dict[int, BaseException] | None = None) -> None:
        self.may, self.fault, self.closed = threading.Event(), fault or {}, False
        self.may.set()
        self.made: list[tuple[int, str]] = []

    def __getitem__(self, step: int) -> list[Any]:
        assert self.may.wait(LIMIT)
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
    with Prefetcher(data, CPU).over(3, 9) as ahead:
        assert [ahead.take() for _ in range(6)] == [[step] for step in range(3, 9)]
    assert [step for step, _ in data.made] == list(range(3, 9))
    assert all(name.startswith("tunekit-data") for _, name in data.made)
    assert data.closed
    assert not threads()


def test_a_step_is_made_before_it_is_asked_for() -> None:
    data = Steps()
    with Prefetcher(data, CPU).over(0, 6) as ahead:
        for step in range(6):
            until(lambda count=step + 1: len(data.made) == count)
            assert ahead.take() == [step]


def test_what_is_waited_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is made in 3 seconds once somebody wants it; the next one is there."""
    data, times = Steps(), iter([10.0, 13.0, 20.0, 20.0])
    data.may.clear()

    def now() -> float:
        data.may.set()
        return next(times)

    monkeypatch.setattr("tunekit.data.dataloader.prefetch.time", SimpleNamespace(perf_counter=now))
    with Prefetcher(data, CPU).over(0, 2) as ahead:
        assert not data.made
        waits = [(ahead.take(), ahead.wait) for _ in range(2)]
    assert waits == [([0], 3.0), ([1], 0.0)]


def test_the_state_is_that_of_the_steps_that_were_taken() -> None:
    data = Steps()
    with Prefetcher(data, CPU).over(0, 5) as ahead:
        ahead.take()
        ahead.take()
        until(lambda: len(data.made) == 3)  # one is ahead
        assert ahead.state_dict() == {"step": 2}
    ahead.load_state_dict({"step": 2})
    assert data.restored == {"step": 2}


@pytest.mark.parametrize("fault", [UserError("rows.jsonl:3: broken"), KeyError("x"), KeyboardInterrupt()])
def test_an_error_comes_as_itself_where_its_step_is_asked_for(fault: BaseException) -> None:
    data, taken = Steps({2: fault}), []
    with pytest.raises(type(fault)) as told, Prefetcher(data, CPU).over(0, 5) as ahead:
        for _ in range(5):
            taken.append(ahead.take())
    assert told.value is fault
    assert taken == [[0], [1]]
    assert data.closed
    assert not threads()


@pytest.mark.parametrize("fault", [UserError("training"), KeyboardInterrupt()])
def test_no_thread_is_left_when_training_fails(fault: BaseException) -> None:
    with pytest.raises(type(fault)), Prefetcher(Steps(), CPU).over(0, 5) as ahead:
        ahead.take()
        raise fault
    assert not threads()


def test_a_run_that_has_ended_wants_no_step() -> None:
    data = Steps()
    with Prefetcher(data, CPU).over(5, 5):
        pass
    assert data.made == []
