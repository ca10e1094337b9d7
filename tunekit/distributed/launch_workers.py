"""A run of several processes from its start to its end, with all its restarts. Nothing here imports torch."""

import json
import os
import subprocess
import time
from typing import Any

from tunekit.distributed import worker_env
from tunekit.distributed.launch_config import End, Place, WorkerSpec
from tunekit.distributed.launcher import Ranks, print_line, tune_command
from tunekit.distributed.rendezvous import Alone, Guest
from tunekit.distributed.signals import TICK, StopRequests
from tunekit.errors import UserError

AGAIN = ("failed", "hung")  # ends after which another start may help


def launch_workers(job: WorkerSpec, wishes: StopRequests) -> None:
    """Start all, see them to their end, and start them again as often as was asked for. SystemExit unless all is well.

    A mistake and a person's wish end it for good: they would come again.
    """
    restarts = job.asked.restarts
    wishes.watch(job.folder)
    with (Guest if job.asked.nodes > 1 else Alone)(job) as others:
        end = once(job, 0, wishes, others)
        for start in range(1, restarts + 1):
            if end.kind not in AGAIN:
                break
            print_line(f"{end.text}\nstarting again from the last complete state (restart {start} of {restarts})")
            end = once(job, start, wishes, others)
    if end.kind == "mistake" and end.text:
        raise UserError(end.text)
    if end.text:
        hint = "; --max-restarts N starts it again by itself" if end.kind in AGAIN and not restarts else ""
        print_line(end.text + hint)
    if end.code:
        raise SystemExit(end.code)


def once(job: WorkerSpec, start: int, wishes: StopRequests, others: Guest | Alone) -> End:
    """One start of all."""
    place = others.meet(start, wishes)
    if isinstance(place, End):
        return place
    print_line(greeting(job, place))
    with Ranks(job, place) as ranks:
        end = watched(ranks, wishes, others)
    last = others.leave(end, wishes)
    if end.kind == "hung" and end.text not in last.text:  # another machine was the first to say so
        print_line(end.text)
    return last


def watched(ranks: Ranks, wishes: StopRequests, others: Guest | Alone) -> End:
    """How the ranks have ended, here or elsewhere. What a long start is about is told."""
    while True:
        if (doing := ranks.doing()) is not None:
            print_line(doing)
        wishes.look()
        if len(wishes.came) > 1:
            return End("asked", 128 + wishes.came[-1], f"{wishes.came[-1].name} again: ended at once")
        if wishes.came and not ranks.sent:
            ranks.send(wishes.came[0])
        end = ranks.ended() or ranks.hangs()
        if end is not None:
            return end
        if (end := others.over()) is not None:
            if end.kind == "hung":  # the rank that all wait for may be here
                print_line(ranks.places())
            return end
        time.sleep(TICK)


def greeting(job: WorkerSpec, place: Place) -> str:
    here = f"starting {job.asked.count} process{'es' * (job.asked.count > 1)}"
    if len(place.names) > 1:
        here += f" of {place.size} on {len(place.names)} machines: {', '.join(place.names)}"
    return here


def check_in_subprocess(words: tuple[str, ...], wishes: StopRequests) -> dict[str, Any]:
    """What a process that may import torch reports about a run; UserError for what is wrong with it."""
    read, write = os.pipe()
    env = {**os.environ, worker_env.REPORT: f"{write}:{os.getpid()}"}
    process = subprocess.Popen(
        tune_command(words), stdin=subprocess.DEVNULL, env=env, pass_fds=[write], process_group=0
    )
    os.close(write)
    while process.poll() is None:
        if wishes.came:
            process.kill()
            process.wait()
            print_line(f"{wishes.came[0].name}: ended before the first step; nothing was changed")
            raise SystemExit(128 + wishes.came[0])
        time.sleep(TICK)
    with os.fdopen(read) as answer:
        text = answer.read()
    if process.returncode:  # an error, which has told itself
        raise SystemExit(1)
    found = json.loads(text)
    if "mistake" in found:
        raise UserError(found["mistake"])
    return found
