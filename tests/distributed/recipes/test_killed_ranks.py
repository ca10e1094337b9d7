"""Runs of several ranks that are killed, stopped and restarted have bit-identical results."""

import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess

import pytest

from tests.helpers.forked_ranks import end_tune, start_tune
from tests.helpers.kill_ranks import (
    KILLS_VARIABLE,
    SEED_VARIABLE,
    SIZE_VARIABLE,
    int_from_env,
    kill_repeatedly,
    worker_pids,
)
from tests.helpers.recipe_runs import Workspace
from tests.helpers.wait import TIMEOUT_SECONDS, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.slow]
RUN = ("run", "sft", "sft.yaml", "adapter={kind: lora, rank: 4, dropout: 0.3}", "max_steps=8", "eval_every=4")


def run_command(workspace: Workspace, *args: str, size: int) -> None:
    """Run `tune run --nproc-per-node`, whose ranks are new Python processes."""
    command = [sys.executable, "-P", "-m", "tunekit.cli", *RUN, "--nproc-per-node", str(size), *args]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=workspace.folder, env=env, capture_output=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert result.returncode == 0, result


def start_run(workspace: Workspace, *args: str, size: int = 2) -> ForkServerProcess:
    """Start `tune run --nproc-per-node`, whose ranks are forks."""
    return start_tune(workspace.folder, *RUN, "--nproc-per-node", str(size), *args)


def count_logged_steps(workspace: Workspace, out: str) -> int:
    """Number of steps in the metrics file."""
    metrics = workspace.folder / out / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.is_file() else 0


def test_ranks_killed_at_random_moments_do_not_change_the_result(workspace: Workspace) -> None:
    """All ranks restart automatically, whichever rank is killed."""
    left, size, seed = int_from_env(KILLS_VARIABLE, 4), int_from_env(SIZE_VARIABLE, 2), int_from_env(SEED_VARIABLE, 0)
    rng, count, runs = random.Random(seed), left, 0
    run_command(workspace, "output_dir=unbroken", "save_every=1", size=size)
    process = start_run(workspace, "output_dir=forked", "save_every=1", size=size)
    wait_until(lambda: worker_pids(process.pid or 0), process)
    start = time.monotonic()
    result = end_tune(process, workspace.folder)
    assert result.code == 0, result
    run_seconds = time.monotonic() - start
    assert workspace.is_same_run("unbroken", "forked")
    while left:
        out = f"out{runs}"
        process = start_run(workspace, f"output_dir={out}", "save_every=1", "--max-restarts", "1000", size=size)
        kills = kill_repeatedly(process, workspace.folder / out, left, size, run_seconds, rng)
        result = end_tune(process, workspace.folder, TIMEOUT_SECONDS + count)
        assert result.code == 0, result
        assert result.err.count("was killed by SIGKILL") == result.err.count("starting again") == kills, result
        assert workspace.is_same_run("unbroken", out)
        left, runs = left - kills, runs + 1
        print(f"{count - left} kills in {runs} runs, seed {seed}")


def test_signal_and_stop_file_stop_all_ranks(workspace: Workspace) -> None:
    long = "max_steps=2000", "eval_every=2000", "save_every=2000"
    process = start_run(workspace, *long)
    wait_until(lambda: count_logged_steps(workspace, "out") >= 2, process)
    os.kill(process.pid or 0, signal.SIGTERM)
    result = end_tune(process, workspace.folder)
    assert result.code == 143 and result.err.count("stopped by SIGTERM after step") == 1, result
    assert "Traceback" not in result.err, result
    assert len(list((workspace.folder / "out/state").iterdir())) == 1
    process = start_run(workspace, *long)
    before = count_logged_steps(workspace, "out")
    wait_until(lambda: count_logged_steps(workspace, "out") >= before + 2, process)
    (workspace.folder / "out/stop").touch()
    result = end_tune(process, workspace.folder)
    assert result.code == 143 and result.err.count("stopped by the file out/stop after step") == 1, result
    assert not (workspace.folder / "out/stop").exists()
