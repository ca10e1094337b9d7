"""Runs of several processes that are killed, stopped and started again end as the unbroken one, to the last bit."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.recipes.kills import KILLS, SEED, SIZE, asked, killed, ranks
from tests.waiting import TIMEOUT_SECONDS, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.slow]
RUN = ("run", "sft", "sft.yaml", "adapter={kind: lora, rank: 4, dropout: 0.3}", "max_steps=8", "eval_every=4")


def start(work, *words, size=2):
    """`tune run --nproc-per-node`, as a person starts it."""
    env = {name: word for name, word in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-P", "-m", "tunekit.cli", *RUN, "--nproc-per-node", str(size), *words]
    return subprocess.Popen(command, cwd=work.folder, env=env, stderr=subprocess.PIPE, text=True)


def end(process, limit=TIMEOUT_SECONDS):
    try:
        err = process.communicate(timeout=limit)[1]
    finally:
        process.kill()
    return process.returncode, err


def steps(work, out):
    """How many steps a run has written down."""
    metrics = work.folder / out / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.is_file() else 0


def test_killed_at_random_moments(work):
    """Whichever rank dies, and when: all start again by themselves."""
    left, size, seed = asked(KILLS, 4), asked(SIZE, 2), asked(SEED, 0)
    dice, count, runs = random.Random(seed), left, 0
    process = start(work, "output_dir=unbroken", "save_every=1", size=size)
    wait_until(lambda: ranks(process.pid), process)
    began = time.monotonic()
    code, err = end(process)
    assert code == 0, err
    whole = time.monotonic() - began
    while left:
        out = f"out{runs}"
        process = start(work, f"output_dir={out}", "save_every=1", "--max-restarts", "1000", size=size)
        kills = killed(process, work.folder / out, left, size, whole, dice)
        code, err = end(process, TIMEOUT_SECONDS + count)
        assert code == 0, err
        assert err.count("was killed by SIGKILL") == err.count("starting again") == kills, err
        assert work.same("unbroken", out)
        left, runs = left - kills, runs + 1
        print(f"{count - left} kills in {runs} runs, seed {seed}")


def test_stopped_by_a_signal_and_by_a_file(work):
    long = "max_steps=2000", "eval_every=2000", "save_every=2000"
    process = start(work, *long)
    wait_until(lambda: steps(work, "out") >= 2, process)
    process.send_signal(signal.SIGTERM)
    code, err = end(process)
    assert code == 143 and err.count("stopped by SIGTERM after step") == 1 and "Traceback" not in err, err
    assert len(list((work.folder / "out/state").iterdir())) == 1
    process = start(work, *long)
    before = steps(work, "out")
    wait_until(lambda: steps(work, "out") >= before + 2, process)
    (work.folder / "out/stop").touch()
    code, err = end(process)
    assert code == 143 and err.count("stopped by the file out/stop after step") == 1, err
    assert not (work.folder / "out/stop").exists()
