"""Ranks of one machine: how they are started, what is shown of them, and how all of them end."""

import os
import signal
from pathlib import Path

import pytest

from tests.parallel.beads import Beads, gone
from tests.waiting import wait_until

pytestmark = pytest.mark.multi
LONG = "beads=1000"


@pytest.fixture
def beads(tmp_path: Path) -> Beads:
    return Beads.make(tmp_path)


def told(text: str) -> list[str]:
    """The lines without what rank 0 says of itself, and what is said where a machine takes long to start it."""
    return [line for line in text.splitlines() if line != "rank 0 warns" and not line.startswith("still starting: ")]


def test_ranks_start_with_what_torchrun_tells_and_only_the_first_is_heard(beads: Beads) -> None:
    ended = beads.run("--nproc-per-node", "3", "ends=true", look=True)
    assert (ended.code, ended.out, told(ended.err)) == (0, "rank 0 is here\n", ["starting 3 processes"])
    cores = len(os.sched_getaffinity(0))
    found = sorted((one.rank, one.size, one.local, one.threads) for one in beads.started())
    assert found == [(rank, 3, rank, max(1, cores // 3)) for rank in range(3)]
    assert beads.strings(3) == [4, 4, 4]
    assert beads.log(2) == "rank 2 is here\nrank 2 warns\n"
    again = beads.run("--nproc-per-node", "2", "ends=true", look=True)
    assert (again.code, again.out, again.err) == (0, "nothing is left to do\n", ""), "it starts no ranks"


def test_mistakes_are_told_once_before_ranks_start(beads: Beads) -> None:
    for words, (text, look) in {
        ("beads=1001",): ("error: beads: 1001 are too many\n", True),
        ("parallel.tp=3",): ("there are 2 processes", True),
        ("parallel.cpu_offload=true",): ("parallel.cpu_offload: device cpu", True),
        ("--nproc-per-node", "400"): ("--nproc-per-node 400", True),
        ("--max-restarts", "-1"): ("must be a non-negative integer, got '-1'", False),
        ("--nnodes", "2"): ("--rdzv-endpoint HOST:PORT", False),
        ("--rdzv-endpoint", "a:1"): ("--nnodes", False),
        ("--nnodes", "2", "--rdzv-endpoint", "here"): ("HOST:PORT", False),
        ("--nnodes", "2", "--rdzv-endpoint", "here:1", "--node-rank", "2"): ("the last is 1", False),
    }.items():
        ended = beads.run("--nproc-per-node", "2", *words, look=look)
        assert ended.code == 2 and text in ended.err, ended
        assert ended.err.startswith("error: ") and "starting" not in ended.err
    assert not (beads.folder / "out").exists()


def test_a_mistake_of_one_rank_is_told_once_and_never_tried_again(beads: Beads) -> None:
    for bad, who in (("mistake", "0"), ("mistake", "1"), ("late", "0")):  # late: Python takes its time to end
        words = (f"bad={bad}", "once=false", f"who={who}", f"output_dir={bad}{who}")
        ended = beads.run("--nproc-per-node", "2", "--max-restarts", "3", *words)
        assert ended.code == 2
        wanted = ["starting 2 processes", "error: the string is too short: take another one"]
        assert told(ended.err) == wanted


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("SIGKILL", "rank 1 was killed by SIGKILL"),
        ("error", "rank 1 failed: ValueError: a bead is lost"),
        ("code", "rank 1 ended with exit code 7"),
    ],
)
def test_a_rank_that_dies_ends_all_and_says_why(beads: Beads, bad: str, reason: str) -> None:
    ended = beads.run("--nproc-per-node", "3", f"bad={bad}")
    assert ended.code == 1
    assert reason in ended.err and "--max-restarts" in ended.err
    assert "rank 1: about to go wrong" in ended.err and "rank 2: " not in ended.err
    assert ("rank 1: ValueError: a bead is lost" in ended.err) == (bad == "error")
    assert all(gone(one.pid) for one in beads.started())


def test_what_has_died_starts_again_from_where_it_was(beads: Beads) -> None:
    ended = beads.run("--nproc-per-node", "2", "--max-restarts", "2", "--overwrite", "bad=SIGKILL")
    assert ended.code == 0, ended
    assert "(restart 1 of 2)" in ended.err and "restart 2" not in ended.err
    assert sorted((one.rank, one.overwrite) for one in beads.started()) == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    assert beads.strings(2) == [4, 4]


def test_restarts_come_to_an_end(beads: Beads) -> None:
    ended = beads.run("--max-restarts", "2", "bad=error", "who=0", "once=false")
    assert ended.code == 1
    assert len(beads.started()) == 3, "one process may be started again, too"
    assert ended.err.count("rank 0 failed: ValueError: a bead is lost") == 3
    assert ended.err.count("Traceback") == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_reaches_all_and_they_save(beads: Beads, number: signal.Signals) -> None:
    process = beads.start("--nproc-per-node", "2", "--max-restarts", "3", LONG)
    wait_until(lambda: list(beads.folder.glob("out/5.*")))
    process.send_signal(number)
    ended = beads.end(process)
    assert ended.code == 128 + number
    assert f"stopped by {number.name} after" in ended.err and "Traceback" not in ended.err
    assert len(beads.started()) == 2


def test_a_file_stops_the_run(beads: Beads) -> None:
    process = beads.start("--nproc-per-node", "2", LONG)
    wait_until(lambda: list(beads.folder.glob("out/5.*")))
    (beads.folder / "out/stop").touch()
    ended = beads.end(process)
    assert ended.code == 143 and "stopped by SIGTERM" in ended.err
    assert not (beads.folder / "out/stop").exists()


def test_a_second_signal_ends_at_once_and_one_while_loading_does(beads: Beads) -> None:
    process = beads.start("--nproc-per-node", "2", "bad=hang")
    wait_until(lambda: (beads.folder / "out/wrong").exists())
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    ended = beads.end(process)
    assert ended.code in (130, 143) and "again: ended at once" in ended.err
    process = beads.start("--nproc-per-node", "2", "--max-restarts", "1", "slow=1000", "output_dir=slow")
    wait_until(lambda: len(beads.started("slow")) == 2)
    process.send_signal(signal.SIGTERM)
    ended = beads.end(process)
    assert ended.code == 143
    assert told(ended.err)[1:] == ["SIGTERM: ended before the first step; nothing was changed"]


def test_a_file_that_comes_while_loading_ends_at_once_and_is_named(beads: Beads) -> None:
    process = beads.start("--nproc-per-node", "2", "slow=1000")
    wait_until(lambda: len(beads.started()) == 2)
    (beads.folder / "out/stop").touch()
    ended = beads.end(process)
    assert ended.code == 143 and not (beads.folder / "out/stop").exists()
    assert told(ended.err)[1:] == ["the file out/stop: ended before the first step; nothing was changed"]


def test_ranks_do_not_outlive_the_one_that_started_them(beads: Beads) -> None:
    process = beads.start("--nproc-per-node", "2", LONG)
    wait_until(lambda: list(beads.folder.glob("out/5.*")))
    process.kill()
    wait_until(lambda: all(gone(one.pid) for one in beads.started()))
    beads.end(process)
