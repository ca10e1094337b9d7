"""Kill ranks of a run at random moments. `python -m tests.helpers.kill_ranks 100 --size 2` does so a hundred times."""

import argparse
import os
import random
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from tests.helpers.wait import has_ended, read_process_state

KILLS_VARIABLE, SIZE_VARIABLE, SEED_VARIABLE = "TUNEKIT_TEST_KILLS", "TUNEKIT_TEST_SIZE", "TUNEKIT_TEST_SEED"
# When to kill: at any time of a start, or a few milliseconds after a directory was created: that of a state after the
# first one, so that the next start resumes.
MOMENTS = (None, "state/*[2-7].partial", None, None, "final.partial")


AnyProcess = Popen[Any] | BaseProcess


def int_from_env(name: str, default: int) -> int:
    """Integer environment variable, such as the number of kills."""
    return int(os.environ.get(name, default))


def worker_pids(parent: int) -> list[int]:
    """Process ids of the workers of `tune run` that exist: the child processes with a session of their own."""
    pids = []
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    for pid in map(int, children):
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                pids.append(pid)
    return pids


def kill_repeatedly(
    process: AnyProcess, out: Path, count: int, size: int, run_seconds: float, dice: random.Random
) -> int:
    """Kill one rank of each start until `count` are killed or the run has ended. Returns the number of kills.

    `run_seconds`: duration of an uninterrupted run.
    """
    kills, known = 0, set()
    while kills < count:
        num_required = dice.choice((1, size))  # sometimes before all ranks have started
        while not has_ended(process) and len(set(worker_pids(process.pid)) - known) < num_required:
            time.sleep(0.005)
        if has_ended(process):
            break
        wait_for_moment(process, out, MOMENTS[kills % len(MOMENTS)], run_seconds, dice)
        alive = sorted(set(worker_pids(process.pid)) - known)
        if not alive:
            continue
        known |= set(alive)
        kills += kill_process(dice.choice(alive))
    return kills


def kill_process(pid: int) -> bool:
    """Kill a process. False if it had already ended."""
    try:
        os.kill(pid, signal.SIGSTOP)
        while (state := read_process_state(pid)) not in "TZX":
            time.sleep(0.0001)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return state == "T"


def wait_for_moment(
    process: AnyProcess, out: Path, moment: str | None, run_seconds: float, dice: random.Random
) -> None:
    """Wait for the moment to kill, or for the end of the run."""
    deadline = time.monotonic() + (dice.uniform(0, run_seconds) if moment is None else 1e9)
    while not has_ended(process) and time.monotonic() < deadline and not (moment and any(out.glob(moment))):
        time.sleep(0.0005)
    time.sleep(dice.uniform(0, 0.01))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    os.environ |= {KILLS_VARIABLE: str(args.kills), SIZE_VARIABLE: str(args.size), SEED_VARIABLE: str(args.seed)}
    tests = "tests/distributed/recipes/test_killed_ranks.py"
    raise SystemExit(pytest.main(["-q", "-s", tests, "-k", "killed", "-o", "faulthandler_timeout=0"]))
