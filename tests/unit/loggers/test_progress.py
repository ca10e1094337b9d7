"""Progress without a terminal: a line every 10 seconds with what is left."""

import time

import pytest

from tunekit.loggers.progress import PRINT_INTERVAL, ProgressLogger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that tests advance."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_lines_without_a_terminal(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLogger("answering", 4_000, "row", is_main=True) as progress:
        for seconds in (1, 0, PRINT_INTERVAL - 1, 3, PRINT_INTERVAL + 20):
            clock[0] += seconds
            progress.update(500)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["answering: 1,500 of 4,000 rows, 00:16 left", "answering: 2,500 of 4,000 rows, 00:25 left"]


def test_other_ranks_and_short_work_print_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLogger("answering", 4, "row", is_main=False) as progress:
        clock[0] += 60
        progress.update()
    with ProgressLogger("answering", 4, "row", is_main=True) as progress:
        progress.update(4)
    assert not capsys.readouterr().err
