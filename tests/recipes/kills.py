"""Killing ranks of a run at random moments. `python -m tests.recipes.kills 100 --size 2` does so a hundred times."""

import argparse
import os
import random
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest

from tunekit.distributed import worker_env

KILLS, SIZE, SEED = "TUNEKIT_TEST_KILLS", "TUNEKIT_TEST_SIZE", "TUNEKIT_TEST_SEED"
# When to kill: at any time of a start, and else a few milliseconds after a folder began to be written.
MOMENTS = (None, "state/*.partial", None, None, "final.partial")


def asked(name: str, otherwise: int) -> int:
    """How many kills or ranks a person wants, or which seed."""
    return int(os.environ.get(name, otherwise))


def ranks(parent: int) -> list[int]:
    """The processes that `tune run` has started as ranks, and that are there."""
    found = []
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    for pid in children:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"\0{worker_env.PARENT}=".encode() in environment:
            found.append(int(pid))
    return found


def killed(process: Popen[str], out: Path, count: int, size: int, whole: float, dice: random.Random) -> int:
    """Kill one of the `size` ranks of each start, until `count` are killed or the run has ended; how many.

    `whole`: the seconds of a run.
    """
    kills, gone = 0, set()
    while kills < count:
        there = dice.choice((1, size))  # seldom enough of all: some may still be on their way
        while process.poll() is None and len(set(ranks(process.pid)) - gone) < there:
            time.sleep(0.005)
        if process.poll() is not None:
            break
        wait(process, out, MOMENTS[kills % len(MOMENTS)], whole, dice)
        here = sorted(set(ranks(process.pid)) - gone)
        if not here:
            continue
        gone |= set(here)
        kills += ended(dice.choice(here))
    return kills


def ended(rank: int) -> bool:
    """Whether it was we who ended a process: one that has come to its end meanwhile is stopped no more."""
    try:
        os.kill(rank, signal.SIGSTOP)
        while (state := Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0]) not in "TZX":
            time.sleep(0.0001)
        os.kill(rank, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state == "T"


def wait(process: Popen[str], out: Path, moment: str | None, whole: float, dice: random.Random) -> None:
    """Until the moment has come, or the run is over."""
    late = time.monotonic() + (dice.uniform(0, whole) if moment is None else 1e9)
    while process.poll() is None and time.monotonic() < late and not (moment and any(out.glob(moment))):
        time.sleep(0.0005)
    time.sleep(dice.uniform(0, 0.01))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    os.environ |= {KILLS: str(args.kills), SIZE: str(args.size), SEED: str(args.seed)}
    raise SystemExit(
        pytest.main(["-q", "-s", "tests/recipes/test_many.py", "-k", "killed", "-o", "faulthandler_timeout=0"])
    )
