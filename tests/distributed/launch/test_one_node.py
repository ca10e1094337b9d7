"""Launching ranks on one node: environment, output, errors and shutdown."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.toy_launcher import ToyLauncher
from tests.helpers.wait import has_exited, wait_until
from tunekit.distributed import worker_env

pytestmark = pytest.mark.multi
MANY_STEPS = "steps=1000"


@pytest.fixture
def toy(tmp_path: Path) -> ToyLauncher:
    return ToyLauncher.make(tmp_path)


def own_lines(text: str) -> list[str]:
    """Lines without the warning of rank 0 and without messages about slow starts."""
    return [line for line in text.splitlines() if line != "rank 0 warns" and not line.startswith("still starting: ")]


def test_ranks_have_the_torchrun_environment_and_only_rank_0_prints(toy: ToyLauncher) -> None:
    result = toy.run("--nproc-per-node", "3", "save=true", check=True)
    assert (result.code, result.out, own_lines(result.err)) == (0, "rank 0 started\n", ["starting 3 processes"])
    cores = len(os.sched_getaffinity(0))
    workers = sorted((worker.rank, worker.size, worker.local, worker.threads) for worker in toy.started_workers())
    assert workers == [(rank, 3, rank, max(1, cores // 3)) for rank in range(3)]
    assert toy.progress(3) == [4, 4, 4]
    assert toy.log(2) == "rank 2 started\nrank 2 warns\n"
    second = toy.run_forked("--nproc-per-node", "2", "save=true")
    assert (second.code, second.out, second.err) == (0, "already complete\n", ""), "no ranks are started"


def test_config_errors_are_reported_once_before_ranks_start(toy: ToyLauncher) -> None:
    for args, message in {
        ("steps=1001",): "error: steps: must be at most 1000, got 1001\n",
        ("parallel.tp=3",): "does not divide the number of processes, 2",
        ("parallel.cpu_offload=true",): "parallel.cpu_offload: device cpu",
        ("--nproc-per-node", "400"): "--nproc-per-node 400",
        ("--max-restarts", "-1"): "must be a non-negative integer, got '-1'",
        ("--nnodes", "2"): "--rdzv-endpoint HOST:PORT",
        ("--rdzv-endpoint", "a:1"): "--nnodes",
        ("--nnodes", "2", "--rdzv-endpoint", "here"): "HOST:PORT",
        ("--nnodes", "2", "--rdzv-endpoint", "here:1", "--node-rank", "2"): "the last is 1",
    }.items():
        result = toy.run_forked("--nproc-per-node", "2", *args)
        assert result.code == 2 and message in result.err, result
        assert result.err.startswith("error: ") and "starting" not in result.err
    assert not (toy.folder / "out").exists()


def test_user_error_of_a_rank_is_reported_once_without_restart(toy: ToyLauncher) -> None:
    for bad, rank in (("user_error", "0"), ("user_error", "1"), ("late", "0")):  # late: Python takes long to exit
        args = (f"fault={bad}", "once=false", f"fault_rank={rank}", f"output_dir={bad}{rank}")
        result = toy.run("--nproc-per-node", "2", "--max-restarts", "3", *args)
        assert result.code == 2
        expected = ["starting 2 processes", "error: toy: user error"]
        assert own_lines(result.err) == expected


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("SIGKILL", "rank 1 was killed by SIGKILL"),
        ("error", r"rank 1 failed: \S+toy\.py:\d+: ValueError: toy error"),
        ("code", "rank 1 ended with exit code 7"),
    ],
)
def test_failed_rank_ends_all_with_the_reason(toy: ToyLauncher, bad: str, reason: str) -> None:
    result = toy.run("--nproc-per-node", "3", f"fault={bad}")
    assert result.code == 1
    assert re.search(reason, result.err) and "--max-restarts" in result.err
    assert "rank 1: about to fail" in result.err and "rank 2: " not in result.err
    assert ("rank 1: ValueError: toy error" in result.err) == (bad == "error")
    assert all(has_exited(worker.pid) for worker in toy.started_workers())


def test_restart_resumes_from_the_last_step(toy: ToyLauncher) -> None:
    result = toy.run("--nproc-per-node", "2", "--max-restarts", "2", "--overwrite", "fault=SIGKILL")
    assert result.code == 0, result
    assert "(restart 1 of 2)" in result.err and "restart 2" not in result.err
    assert sorted((worker.rank, worker.overwrite) for worker in toy.started_workers()) == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    assert toy.progress(2) == [4, 4]


def test_max_restarts_is_a_limit(toy: ToyLauncher) -> None:
    result = toy.run("--max-restarts", "2", "fault=error", "fault_rank=0", "once=false")
    assert result.code == 1
    assert len(toy.started_workers()) == 3, "a single process can be restarted, too"
    assert len(re.findall(r"rank 0 failed: \S+toy\.py:\d+: ValueError: toy error", result.err)) == 3
    assert result.err.count("Traceback") == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_signal_reaches_all_ranks(toy: ToyLauncher, number: signal.Signals) -> None:
    process = toy.start("--nproc-per-node", "2", "--max-restarts", "3", MANY_STEPS)
    wait_until(lambda: list(toy.folder.glob("out/5.*")))
    process.send_signal(number)
    result = toy.end(process)
    assert result.code == 128 + number
    assert f"stopped by {number.name} after" in result.err and "Traceback" not in result.err
    assert len(toy.started_workers()) == 2


def test_stop_file_stops_the_run(toy: ToyLauncher) -> None:
    process = toy.start("--nproc-per-node", "2", MANY_STEPS)
    wait_until(lambda: list(toy.folder.glob("out/5.*")))
    (toy.folder / "out/stop").touch()
    result = toy.end(process)
    assert result.code == 143 and "stopped by SIGTERM" in result.err
    assert not (toy.folder / "out/stop").exists()


def test_second_signal_or_signal_before_the_first_step_ends_immediately(toy: ToyLauncher) -> None:
    process = toy.start("--nproc-per-node", "2", "fault=hang")
    wait_until(lambda: (toy.folder / "out/failed").exists())
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    result = toy.end(process)
    assert result.code in (130, 143) and "again: ended at once" in result.err
    process = toy.start("--nproc-per-node", "2", "--max-restarts", "1", "slow=1000", "output_dir=slow")
    wait_until(lambda: len(toy.started_workers("slow")) == 2)
    process.send_signal(signal.SIGTERM)
    result = toy.end(process)
    assert result.code == 143
    assert own_lines(result.err)[1:] == ["SIGTERM: ended before the first step; nothing was changed"]


def test_stop_file_before_the_first_step_ends_immediately(toy: ToyLauncher) -> None:
    process = toy.start("--nproc-per-node", "2", "slow=1000")
    wait_until(lambda: len(toy.started_workers()) == 2)
    (toy.folder / "out/stop").touch()
    result = toy.end(process)
    assert result.code == 143 and not (toy.folder / "out/stop").exists()
    assert own_lines(result.err)[1:] == ["the file out/stop: ended before the first step; nothing was changed"]


def test_ranks_end_with_their_launcher(toy: ToyLauncher) -> None:
    process = toy.start("--nproc-per-node", "2", MANY_STEPS)
    wait_until(lambda: list(toy.folder.glob("out/5.*")))
    process.kill()
    wait_until(lambda: all(has_exited(worker.pid) for worker in toy.started_workers()))
    toy.end(process)


@pytest.mark.parametrize("variable", [(worker_env.PARENT, "-1"), (worker_env.REPORT, "9:-1")], ids=["rank", "check"])
def test_process_without_its_launcher_ends_before_it_does_anything(variable: tuple[str, str]) -> None:
    """A launcher that was killed while the process started. The command has an error, which is not found any more."""
    command = [sys.executable, "-P", "-X", "importtime", "-m", "tunekit.cli", "run", "no_such_recipe"]
    done = subprocess.run(command, env={**os.environ, variable[0]: variable[1]}, capture_output=True, text=True)
    assert done.returncode == 1 and "error" not in done.stderr
    assert "tunekit.cli.main" not in done.stderr, "it ends before other modules are imported"
