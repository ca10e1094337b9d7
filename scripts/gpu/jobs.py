"""Jobs of a call: commands with time limits, run next to each other until a deadline, and a report of all of them."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MARGIN = 5  # seconds before the deadline at which a job is stopped
LOG_BYTES = 1_500_000  # of each job in the log of a call: files of more than 16 MiB are lost
TAIL = 25  # last lines of a failed job in the report
NOTABLE = re.compile(r"Error|error:|failed|FAIL|passed|Warning", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """A command. Jobs of a later stage start when all jobs of the earlier ones have ended."""

    name: str
    command: tuple[str, ...]
    seconds: int
    stage: int = 0
    interrupt_when: str | None = None  # send SIGINT when this file appears; exit code 130 is then success
    summary_lines: int = 0  # lines at the end of the output that the report shows


@dataclass
class Done:
    """A job that has ended, or was never started."""

    job: Job
    status: str
    seconds: float
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def note(self) -> str:
        """The last line that says something about the result."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        notable = [line for line in lines if NOTABLE.search(line)]
        return (notable or lines or [""])[-1][:200] if not self.ok else ""


@dataclass
class Call:
    """All jobs of a call. Reports are rewritten after each job: an early end loses none of them."""

    name: str
    output: Path
    deadline: float  # of time.monotonic()
    heading: str
    results: list[Done] = field(default_factory=list)

    def run(self, jobs: Sequence[Job], workers: int) -> bool:
        """Run jobs, `workers` at once. Whether all of them succeeded."""
        self.output.mkdir(parents=True, exist_ok=True)
        for stage in sorted({job.stage for job in jobs}):
            with ThreadPoolExecutor(workers) as pool:
                for done in pool.map(self.run_job, [job for job in jobs if job.stage == stage]):
                    self.add(done)
        bad = [done for done in self.results if not done.ok]
        print(f"\n{len(self.results) - len(bad)} of {len(self.results)} jobs succeeded; report: {self.report}")
        for done in bad:
            print(f"{done.status}: {done.job.name}: {done.note}")
        return not bad

    @property
    def report(self) -> Path:
        return self.output / f"{self.name}.md"

    def run_job(self, job: Job) -> Done:
        """Run a command in a process group of its own, which is killed at its time limit."""
        start = time.monotonic()
        limit = min(job.seconds, self.deadline - MARGIN - start)
        if limit < MARGIN:
            return Done(job, "not started", 0.0, "the deadline of the call was reached")
        log = self.output.parent / f".{self.output.name}-{job.name.replace('/', '_')}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            status = wait(process, job, start + limit)
            if status == "over" and limit < job.seconds:
                status = "cut at the end of the call"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        text = log.read_text(errors="replace")
        log.unlink()
        return Done(job, status, time.monotonic() - start, text)

    def add(self, done: Done) -> None:
        self.results.append(done)
        print(f"{done.status:12} {done.seconds:6.1f} s  {done.job.name}  {done.note}", flush=True)
        with (self.output / f"{self.name}.log").open("a") as file:
            file.write(f"\n===== {done.job.name}: {done.status}, {done.seconds:.1f} s\n{shorten(done.output)}")
        self.report.write_text(self.markdown())

    def markdown(self) -> str:
        ok = sum(done.ok for done in self.results)
        text = f"# {self.name}\n\n{self.heading}\n\n{ok} of {len(self.results)} jobs succeeded.\n\n"
        text += "| job | status | seconds | note |\n|---|---|---|---|\n"
        for done in self.results:
            note = done.note.replace("|", "\\|")
            text += f"| {done.job.name} | {done.status} | {done.seconds:.1f} | {note} |\n"
        for done in self.results:
            lines = done.output.splitlines()[-(TAIL if not done.ok else done.job.summary_lines) :]
            if not done.ok or done.job.summary_lines:
                text += f"\n## {done.job.name}\n\n```\n" + "\n".join(line[:400] for line in lines) + "\n```\n"
        return text


def wait(process: subprocess.Popen[bytes], job: Job, end: float) -> str:
    """Wait for the end of a process and send the signal that a job asks for. `over`: it did not end in time."""
    interrupted = False
    while time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=0.2)
            expected = 130 if job.interrupt_when else 0
            return "ok" if code == expected else f"exit {code}"
        if job.interrupt_when and not interrupted and Path(job.interrupt_when).exists():
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.killpg(process.pid, signal.SIGABRT)  # faulthandler, where it is on, prints where Python is
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    return "over"


def shorten(text: str) -> str:
    """Beginning and end of a long log."""
    half = LOG_BYTES // 2
    return text if len(text) <= LOG_BYTES else f"{text[:half]}\n[...]\n{text[-half:]}"
