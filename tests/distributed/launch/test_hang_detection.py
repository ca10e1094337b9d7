"""Detection of hung ranks, and of the rank that the others wait for."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.launch.test_nodes import ALL_REDUCE_RECIPE
from tests.helpers.forked_ranks import end_tune
from tests.helpers.toy_launcher import ToyLauncher
from tests.helpers.wait import has_exited, wait_until
from tunekit.distributed import heartbeat, worker_env
from tunekit.distributed.heartbeat import (
    Heartbeat,
    HeartbeatMonitor,
    HeartbeatWriter,
    find_stalled_rank,
    parse_threads,
    rank_status,
)
from tunekit.distributed.launch_config import LaunchConfig, RendezvousInfo, WorkerSpec
from tunekit.distributed.launcher import WorkerGroup

ALL_REDUCE_STACK = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f2 (most recent call first):
  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/venv/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/src/tunekit/distributed/context.py", line 172 in total
  File "/src/recipes/sft.py", line 201 in train_step
"""
# A hook of torch.distributed that reads a file is not a collective.
READ_STACK = """\
Current thread 0x00007f2 (most recent call first):
  File "/src/tunekit/data/rows.py", line 12 in read
  File "/venv/site-packages/torch/distributed/fsdp/_state.py", line 33 in hook
"""
HEARTBEAT = Heartbeat(7, 0.0, "step", 0.0, "")


def test_stalled_rank_is_found_from_stacks() -> None:
    assert [frames[0].name for frames in parse_threads(ALL_REDUCE_STACK)] == ["wait", "all_reduce"]
    waits, reads, silent = (
        rank_status(0, HEARTBEAT, ALL_REDUCE_STACK),
        rank_status(1, HEARTBEAT, READ_STACK),
        rank_status(2, HEARTBEAT, ""),
    )
    assert str(waits) == "rank 0: step 7, step; waits in all_reduce, from total (distributed/context.py:172)"
    assert str(reads) == "rank 1: step 7, step; in read (data/rows.py:12)"
    assert "does not answer" in str(silent)
    assert find_stalled_rank([waits, reads], 5).splitlines()[-1] == "the others wait for rank 1"
    assert find_stalled_rank([waits, reads, silent], 5).splitlines()[-1] == "the others wait for rank 1 and rank 2"
    assert "in all_reduce: for a rank of another node" in find_stalled_rank([waits, waits], 5)
    other = rank_status(1, HEARTBEAT, ALL_REDUCE_STACK.replace("in all_reduce", "in broadcast"))
    assert "different collectives" in find_stalled_rank([waits, other], 5)
    assert "no rank waits" in find_stalled_rank([reads, silent], 5)


def test_compilation_has_a_longer_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    HeartbeatWriter.open().record(3, "no monitor")
    monitor = HeartbeatMonitor(2)
    for slot in range(2):
        monkeypatch.setenv(worker_env.HEARTBEAT, monitor.environment(slot)[worker_env.HEARTBEAT])
        HeartbeatWriter.open().record(slot + 4, "step" if slot else "compile")
    assert [(heartbeat_of_rank.step, heartbeat_of_rank.phase) for heartbeat_of_rank in monitor.read_all()] == [
        (4, "compile"),
        (5, "step"),
    ]
    clock[0] += 9.0
    assert not monitor.is_stalled(1.0) and not monitor.is_stalled(20.0), "compilation has ten times the limit"
    clock[0] += 1.5
    assert monitor.is_stalled(1.0) and not monitor.is_stalled(1.1)
    HeartbeatWriter.open().record(6, "step")
    monkeypatch.setenv(worker_env.HEARTBEAT, monitor.environment(0)[worker_env.HEARTBEAT])
    HeartbeatWriter.open().record(6, "step")
    clock[0] += 2.0
    assert monitor.is_stalled(1.0) and not monitor.is_stalled(3.0)
    with pytest.raises(OSError, match="gone"), HeartbeatWriter.open():
        raise OSError("the disk is gone")
    assert monitor.read_all()[0].reason == "OSError: the disk is gone" and monitor.read_all()[0].failure_time
    monitor.close()


@pytest.mark.multi
def test_hung_rank_is_reported_and_restarted(tmp_path: Path) -> None:
    toy = ToyLauncher.make(tmp_path)
    result = toy.run("--nproc-per-node", "2", "--max-restarts", "1", "fault=hang", "parallel.hang_timeout_seconds=15")
    assert result.code == 0, result
    assert "for 15 s" in result.err and "rank 1: step 2, step; in fail" in result.err
    assert "rank 0: step 2, step; in wait_for_all" in result.err
    assert "in fail" in (tmp_path / "out/logs/stacks-0.txt").read_text()


@pytest.mark.multi
@pytest.mark.slow
def test_ranks_that_wait_in_a_collective_are_recognized(tmp_path: Path) -> None:
    toy = ToyLauncher.make(tmp_path)
    (tmp_path / "toy.py").write_text(ALL_REDUCE_RECIPE)
    (tmp_path / "toy.yaml").write_text("output_dir: out\n")
    (tmp_path / "out").mkdir()
    process = toy.start_forked("--nproc-per-node", "2", "parallel.hang_timeout_seconds=15")
    wait_until(lambda: all((tmp_path / f"out/step.{rank}").exists() for rank in range(2)), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGSTOP)
    result = end_tune(process, tmp_path)
    assert result.code == 1
    assert "waits in all_reduce, from sum_numbers (distributed/context.py" in result.err, result.err
    assert "rank 1: step" in result.err and "does not answer: stopped" in result.err
    assert "the others wait for rank 1" in result.err
    assert all(has_exited(int(pid)) for pid in children)


def test_ended_ranks_are_not_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "STACK_TIMEOUT_SECONDS", 0.5)
    workers = WorkerGroup(WorkerSpec((), LaunchConfig(gpus=2), None, 1.0), RendezvousInfo(0, 2, "127.0.0.1", 0))
    workers.processes = [subprocess.Popen(command) for command in (["true"], ["sleep", "1000"])]
    workers.processes[0].wait()
    try:
        status = workers.write_hang_report()
    finally:
        workers.__exit__(None, None, None)
    assert "\n  rank 1: " in status and "rank 0" not in status
