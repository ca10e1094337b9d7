"""Runs checks in worker processes: a check that crashes, hangs or raises ends no other. Does not import torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from tunekit.errors import UserError
from tunekit.selftest.checklist import START_SECONDS, TOTAL_SECONDS, Check
from tunekit.selftest.result import Outcome

WORKER = (sys.executable, "-P", "-m", "tunekit.selftest.worker")
NO_DEVICE = 3  # exit code of a worker: the requested device does not exist
# Everything that is read comes with the package.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # of a launcher around this process
BUSY = 2  # runnable threads on each core
LOG_LINES = 12  # last lines of a worker that crashed


@dataclass
class Runner:
    """Runs checks and passes each outcome to `report`."""

    device: str
    quick: bool
    report: Callable[[Outcome], None]
    total_seconds: float = TOTAL_SECONDS
    start_seconds: float = START_SECONDS
    package: str = "tunekit.selftest"  # where the modules of checks are
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, checks: Sequence[Check]) -> list[Outcome]:
        """Run all checks, in workers that they share."""
        self.deadline = time.monotonic() + self.total_seconds
        with TemporaryDirectory(prefix="tunekit-selftest-") as self.directory:
            self.run_all(checks)
        return self.outcomes

    def run_all(self, checks: Sequence[Check]) -> None:
        for _, shared in groupby(checks, key=lambda check: check.worker):
            waiting = []
            for check in shared:
                if self.quick and not check.quick:
                    self.add(Outcome(check.name, "skipped", 0.0, "not part of --quick"))
                else:
                    waiting.append(check)
            while waiting:
                finished = self.run_worker(waiting)
                waiting = waiting[finished:]

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.report(outcome)

    def run_worker(self, checks: Sequence[Check]) -> int:
        """Run checks in a new worker until the last one, or until it ends early. Returns how many have an outcome."""
        if self.deadline - time.monotonic() < 1:
            for check in checks:
                self.add(Outcome(check.name, "skipped", 0.0, f"time limit of {self.total_seconds:g} s reached"))
            return len(checks)
        names = [(check.name, f"{self.package}.{check.module}") for check in checks]
        job = {"device": self.device, "checks": names, "directory": self.directory}
        with TemporaryFile() as log, Worker(job, log) as worker:
            return self.follow(worker, checks)

    def follow(self, worker: "Worker", checks: Sequence[Check]) -> int:
        """Receive outcomes. Returns how many there were."""
        finished, started = 0, time.monotonic()
        limit = self.start_seconds
        while finished < len(checks):
            message = worker.receive(min(started + limit, self.deadline) - time.monotonic())
            if message is None:
                self.add(self.interrupted(worker, checks[finished], time.monotonic() - started))
                return finished + 1
            if message == "closing":
                break
            started, limit = time.monotonic(), checks[finished].seconds
            if isinstance(message, Outcome):
                self.add(message)
                finished, limit = finished + 1, self.start_seconds
        return finished

    def interrupted(self, worker: "Worker", check: Check, seconds: float) -> Outcome:
        """The outcome of a check whose worker hangs or has ended."""
        code = worker.end()
        if code == NO_DEVICE:
            raise UserError(f"--device {self.device}: torch does not find this device on this machine")
        if worker.hangs and time.monotonic() >= self.deadline:
            reason = f"stopped after {seconds:.0f} s: time limit of all checks ({self.total_seconds:g} s) reached"
            return Outcome(check.name, "skipped", seconds, reason)
        if worker.hangs:
            text = f"no result after {seconds:.0f} s{load_hint()}"
            return Outcome(check.name, "failed", seconds, text, {"log": worker.log()})
        text = f"worker was killed by {signal.Signals(-code).name}" if code < 0 else f"worker ended with code {code}"
        return Outcome(check.name, "failed", seconds, text, {"log": worker.log()})


def load_hint() -> str:
    """The load of a busy machine, on which checks exceed their time limits."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"; the machine is busy (load {load:.0f} on {cores} cores): repeat it later" if load > BUSY * cores else ""


class Worker:
    """A worker process with its own process group, which is killed at the end of the `with` block."""

    def __init__(self, job: dict[str, Any], log: IO[bytes]) -> None:
        self.output, self.hangs = log, False
        self.connection, writer = Pipe(duplex=False)
        env = {key: value for key, value in os.environ.items() if key not in FOREIGN} | OFFLINE
        command = [*WORKER, str(writer.fileno()), json.dumps(job)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with writer:
            self.process = subprocess.Popen(
                command, env=env, pass_fds=[writer.fileno()], start_new_session=True, **streams
            )

    def receive(self, seconds: float) -> str | Outcome | None:
        """The next message; None if the worker has ended or is silent for this number of seconds."""
        self.hangs = not self.connection.poll(max(0.0, seconds))
        with suppress(EOFError):
            return None if self.hangs else self.connection.recv()
        return None

    def end(self) -> int:
        """Stop the worker and its children if it hangs; the exit code."""
        if self.hangs:
            self.kill()
        return self.process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def log(self) -> list[str]:
        """The last lines that the worker printed."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-LOG_LINES:]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()
