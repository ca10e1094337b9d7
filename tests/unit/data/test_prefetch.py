"""The prefetcher prepares the next step during training: in order, with its errors, and without a leaked thread."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.wait import TIMEOUT_SECONDS, wait_until
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.errors import UserError

CPU = torch.device("cpu")


class Steps:
    """Data whose steps are their numbers. Steps wait for `may`, and those in `fault` raise."""

    def __init__(self, errors: dict[int, BaseException] | None = None) -> None:
        self.may, self.errors, self.closed = threading.Event(), errors or {}, False
        self.may.set()
        self.prepared: list[tuple[int, str]] = []

    def __getitem__(self, step: int) -> list[Any]:
        assert self.may.wait(TIMEOUT_SECONDS)
        if step in self.errors:
            raise self.errors[step]
        self.prepared.append((step, threading.current_thread().name))
        return [step]

    def state_dict(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state

    def close(self) -> None:
        self.closed = True


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tunekit-data")]


def test_steps_are_prepared_in_order_once_by_a_thread() -> None:
    data = Steps()
    with Prefetcher(data, CPU).start(3, 9) as ahead:
        assert [ahead.next() for _ in range(6)] == [[step] for step in range(3, 9)]
    assert [step for step, _ in data.prepared] == list(range(3, 9))
    assert all(name.startswith("tunekit-data") for _, name in data.prepared)
    assert data.closed
    assert not data_threads()


def test_step_is_prepared_before_it_is_requested() -> None:
    data = Steps()
    with Prefetcher(data, CPU).start(0, 6) as ahead:
        for step in range(6):
            wait_until(lambda count=step + 1: len(data.prepared) == count)
            assert ahead.next() == [step]


def test_waiting_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes 3 seconds, the next one is ready."""
    data, times = Steps(), iter([10.0, 13.0, 20.0, 20.0])
    data.may.clear()

    def now() -> float:
        data.may.set()
        return next(times)

    monkeypatch.setattr("tunekit.data.dataloader.prefetch.time", SimpleNamespace(perf_counter=now))
    with Prefetcher(data, CPU).start(0, 2) as ahead:
        assert not data.prepared
        waits = [(ahead.next(), ahead.data_time) for _ in range(2)]
    assert waits == [([0], 3.0), ([1], 0.0)]


def test_state_is_that_of_the_steps_taken() -> None:
    data = Steps()
    with Prefetcher(data, CPU).start(0, 5) as ahead:
        ahead.next()
        ahead.next()
        wait_until(lambda: len(data.prepared) == 3)  # one is prefetched
        assert ahead.state_dict() == {"step": 2}
    ahead.load_state_dict({"step": 2})
    assert data.restored == {"step": 2}


@pytest.mark.parametrize("fault", [UserError("rows.jsonl:3: broken"), KeyError("x"), KeyboardInterrupt()])
def test_error_is_raised_at_its_step(fault: BaseException) -> None:
    data, steps = Steps({2: fault}), []
    with pytest.raises(type(fault)) as error, Prefetcher(data, CPU).start(0, 5) as ahead:
        for _ in range(5):
            steps.append(ahead.next())
    assert error.value is fault
    assert steps == [[0], [1]]
    assert data.closed
    assert not data_threads()


@pytest.mark.parametrize("fault", [UserError("training"), KeyboardInterrupt()])
def test_no_thread_is_left_when_training_fails(fault: BaseException) -> None:
    with pytest.raises(type(fault)), Prefetcher(Steps(), CPU).start(0, 5) as ahead:
        ahead.next()
        raise fault
    assert not data_threads()


def test_finished_run_prepares_no_step() -> None:
    data = Steps()
    with Prefetcher(data, CPU).start(5, 5):
        pass
    assert data.prepared == []
