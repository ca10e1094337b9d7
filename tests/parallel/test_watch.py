"""Ranks that hang: who is where, and for whom the others wait."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.parallel.beads import Beads, gone
from tests.parallel.test_cut import RING
from tests.waiting import wait_until
from tunekit.distributed import heartbeat, worker_env
from tunekit.distributed.heartbeat import (
    Heartbeat,
    HeartbeatMonitor,
    HeartbeatWriter,
    find_stalled_rank,
    rank_status,
    threads,
)
from tunekit.distributed.launch_config import LaunchConfig, Place, WorkerSpec
from tunekit.distributed.launcher import Ranks

EXCHANGE = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f2 (most recent call first):
  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/venv/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/src/tunekit/distributed/context.py", line 172 in total
  File "/src/recipes/sft.py", line 201 in train_step
"""
# A hook that torch.distributed has called reads a file: that is no exchange.
READING = """\
Current thread 0x00007f2 (most recent call first):
  File "/src/tunekit/data/rows.py", line 12 in read
  File "/venv/site-packages/torch/distributed/fsdp/_state.py", line 33 in hook
"""
BEAT = Heartbeat(7, 0.0, "step", 0.0, "")


def test_stacks_are_read_and_the_culprit_named() -> None:
    assert [frames[0].name for frames in threads(EXCHANGE)] == ["wait", "all_reduce"]
    waits, reads, silent = rank_status(0, BEAT, EXCHANGE), rank_status(1, BEAT, READING), rank_status(2, BEAT, "")
    assert str(waits) == "rank 0: step 7, step; waits in all_reduce, from total (distributed/context.py:172)"
    assert str(reads) == "rank 1: step 7, step; in read (data/rows.py:12)"
    assert "does not answer" in str(silent)
    assert find_stalled_rank([waits, reads], 5).splitlines()[-1] == "the others wait for rank 1"
    assert find_stalled_rank([waits, reads, silent], 5).splitlines()[-1] == "the others wait for rank 1 and rank 2"
    assert "in all_reduce: for a rank of another machine" in find_stalled_rank([waits, waits], 5)
    other = rank_status(1, BEAT, EXCHANGE.replace("in all_reduce", "in broadcast"))
    assert "different exchanges" in find_stalled_rank([waits, other], 5)
    assert "no rank waits" in find_stalled_rank([reads, silent], 5)


def test_beats_are_read_and_long_phases_have_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    HeartbeatWriter.open().beat(3, "nobody reads this")
    board = HeartbeatMonitor(2)
    for slot in range(2):
        monkeypatch.setenv(worker_env.BEATS, board.environment(slot)[worker_env.BEATS])
        HeartbeatWriter.open().beat(slot + 4, "step" if slot else "compile")
    assert [(beat.step, beat.phase) for beat in board.beats()] == [(4, "compile"), (5, "step")]
    clock[0] += 9.0
    assert not board.silent(1.0) and not board.silent(20.0), "who compiles has ten times the limit"
    clock[0] += 1.5
    assert board.silent(1.0) and not board.silent(1.1)
    HeartbeatWriter.open().beat(6, "step")
    monkeypatch.setenv(worker_env.BEATS, board.environment(0)[worker_env.BEATS])
    HeartbeatWriter.open().beat(6, "step")
    clock[0] += 2.0
    assert board.silent(1.0) and not board.silent(3.0)
    with pytest.raises(OSError, match="gone"), HeartbeatWriter.open():
        raise OSError("the disk is gone")
    assert board.beats()[0].reason == "OSError: the disk is gone" and board.beats()[0].failed
    board.close()


@pytest.mark.multi
def test_a_rank_that_hangs_is_named_and_all_start_again(tmp_path: Path) -> None:
    beads = Beads.make(tmp_path)
    ended = beads.run("--nproc-per-node", "2", "--max-restarts", "1", "bad=hang", "parallel.hang_timeout_seconds=5")
    assert ended.code == 0, ended
    assert "no rank has gone on for 5 s" in ended.err and "rank 1: step 2, step; in go_wrong" in ended.err
    assert "rank 0: step 2, step; in wait_for_all" in ended.err
    assert "in go_wrong" in (tmp_path / "out/logs/stacks-0.txt").read_text()


@pytest.mark.multi
@pytest.mark.slow
def test_the_others_are_seen_to_wait_in_an_exchange(tmp_path: Path) -> None:
    beads = Beads.make(tmp_path)
    (tmp_path / "beads.py").write_text(RING)
    (tmp_path / "beads.yaml").write_text("output_dir: out\n")
    (tmp_path / "out").mkdir()
    process = beads.start("--nproc-per-node", "2", "parallel.hang_timeout_seconds=10")
    wait_until(lambda: all((tmp_path / f"out/step.{rank}").exists() for rank in range(2)))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGSTOP)
    ended = beads.end(process)
    assert ended.code == 1
    assert "waits in all_reduce, from totals (distributed/context.py" in ended.err, ended.err
    assert "rank 1: step" in ended.err and "does not answer: stopped" in ended.err
    assert "the others wait for rank 1" in ended.err
    assert all(gone(int(pid)) for pid in children)


def test_ranks_that_have_ended_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "ANSWER", 0.5)
    ranks = Ranks(WorkerSpec((), LaunchConfig(gpus=2), None, 1.0), Place(0, 2, "127.0.0.1", 0))
    ranks.processes = [subprocess.Popen(words) for words in (["true"], ["sleep", "1000"])]
    ranks.processes[0].wait()
    try:
        told = ranks.places()
    finally:
        ranks.__exit__(None, None, None)
    assert "\n  rank 1: " in told and "rank 0" not in told
