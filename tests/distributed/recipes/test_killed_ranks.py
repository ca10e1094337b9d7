"""Runs of several ranks that are killed, stopped and restarted have bit-identical results."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.kill_ranks import (
    KILLS_VARIABLE,
    SEED_VARIABLE,
    SIZE_VARIABLE,
    int_from_env,
    kill_repeatedly,
    worker_pids,
)
from tests.helpers.wait import TIMEOUT_SECONDS, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.slow]
RUN = ("run", "sft", "sft.yaml", "adapter={kind: lora, rank: 4, dropout: 0.3}", "max_steps=8", "eval_every=4")


def start_run(workspace, *args, size=2):
    """Start `tune run --nproc-per-node`."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-P", "-m", "tunekit.cli", *RUN, "--nproc-per-node", str(size), *args]
    return subprocess.Popen(command, cwd=workspace.folder, env=env, stderr=subprocess.PIPE, text=True)


def finish(process, limit=TIMEOUT_SECONDS):
    try:
        err = process.communicate(timeout=limit)[1]
    finally:
        process.kill()
    return process.returncode, err


def count_logged_steps(workspace, out):
    """Number of steps in the metrics file."""
    metrics = workspace.folder / out / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.is_file() else 0


def test_ranks_killed_at_random_moments_do_not_change_the_result(workspace):
    """All ranks restart automatically, whichever rank is killed."""
    left, size, seed = int_from_env(KILLS_VARIABLE, 4), int_from_env(SIZE_VARIABLE, 2), int_from_env(SEED_VARIABLE, 0)
    rng, count, runs = random.Random(seed), left, 0
    process = start_run(workspace, "output_dir=unbroken", "save_every=1", size=size)
    wait_until(lambda: worker_pids(process.pid), process)
    start = time.monotonic()
    code, err = finish(process)
    assert code == 0, err
    run_seconds = time.monotonic() - start
    while left:
        out = f"out{runs}"
        process = start_run(workspace, f"output_dir={out}", "save_every=1", "--max-restarts", "1000", size=size)
        kills = kill_repeatedly(process, workspace.folder / out, left, size, run_seconds, rng)
        code, err = finish(process, TIMEOUT_SECONDS + count)
        assert code == 0, err
        assert err.count("was killed by SIGKILL") == err.count("starting again") == kills, err
        assert workspace.is_same_run("unbroken", out)
        left, runs = left - kills, runs + 1
        print(f"{count - left} kills in {runs} runs, seed {seed}")


def test_signal_and_stop_file_stop_all_ranks(workspace):
    long = "max_steps=2000", "eval_every=2000", "save_every=2000"
    process = start_run(workspace, *long)
    wait_until(lambda: count_logged_steps(workspace, "out") >= 2, process)
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == 143 and err.count("stopped by SIGTERM after step") == 1 and "Traceback" not in err, err
    assert len(list((workspace.folder / "out/state").iterdir())) == 1
    process = start_run(workspace, *long)
    before = count_logged_steps(workspace, "out")
    wait_until(lambda: count_logged_steps(workspace, "out") >= before + 2, process)
    (workspace.folder / "out/stop").touch()
    code, err = finish(process)
    assert code == 143 and err.count("stopped by the file out/stop after step") == 1, err
    assert not (workspace.folder / "out/stop").exists()
