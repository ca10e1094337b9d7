"""Jobs of a suite: commands with time limits, run in parallel until a deadline, and a report of all of them."""

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

DEADLINE_MARGIN = 5  # seconds before the deadline at which running jobs are stopped
MAX_LOG_CHARS = 1_500_000  # of each job in the log of the suite: the device tool drops files of more than 16 MiB
NUM_FAILURE_LINES = 25  # last output lines of a failed job in the report
RESULT_LINE = re.compile(r"Error|error:|failed|FAIL|passed|Warning", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """A command. Jobs of a stage start when all jobs of the previous stages have ended."""

    name: str
    command: tuple[str, ...]
    time_limit: int  # seconds
    stage: int = 0
    interrupt_file: str | None = None  # send SIGINT when this file appears; the expected exit code is then 130
    num_report_lines: int = 0  # last output lines in the report if the job succeeds


@dataclass
class JobResult:
    """Status, duration in seconds, and output of a job. Status `ok`: the job succeeded."""

    job: Job
    status: str
    duration: float
    output: str = ""

    @property
    def succeeded(self) -> bool:
        return self.status == "ok"

    @property
    def failure_message(self) -> str:
        """Last output line that reports an error or a result; "" if the job succeeded."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        result_lines = [line for line in lines if RESULT_LINE.search(line)]
        return (result_lines or lines or [""])[-1][:200] if not self.succeeded else ""


@dataclass
class JobRunner:
    """Runs the jobs of a suite. The report is rewritten after each job, so that an early end loses no result."""

    suite: str
    output_dir: Path
    deadline: float  # of time.monotonic()
    environment: str  # hardware and versions
    results: list[JobResult] = field(default_factory=list)

    def run(self, jobs: Sequence[Job], num_workers: int) -> bool:
        """Run up to `num_workers` jobs in parallel. Returns whether all of them succeeded."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for stage in sorted({job.stage for job in jobs}):
            with ThreadPoolExecutor(num_workers) as pool:
                for result in pool.map(self.run_job, [job for job in jobs if job.stage == stage]):
                    self.add_result(result)
        failures = [result for result in self.results if not result.succeeded]
        print(f"\n{self.format_success_count()}; report: {self.report_path}")
        for result in failures:
            print(f"{result.status}: {result.job.name}: {result.failure_message}")
        return not failures

    @property
    def report_path(self) -> Path:
        return self.output_dir / f"{self.suite}.md"

    def run_job(self, job: Job) -> JobResult:
        """Run a command in its own process group, which is killed at the time limit."""
        start = time.monotonic()
        time_limit = min(job.time_limit, self.deadline - DEADLINE_MARGIN - start)
        if time_limit < DEADLINE_MARGIN:
            return JobResult(job, "not started", 0.0, "the deadline of the suite was reached")
        log = self.output_dir.parent / f".{self.output_dir.name}-{job.name.replace('/', '_')}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            status = wait_for_exit(process, job, start + time_limit)
            if status == "timeout" and time_limit < job.time_limit:
                status = "stopped at the deadline of the suite"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output = log.read_text(errors="replace")
        log.unlink()
        return JobResult(job, status, time.monotonic() - start, output)

    def add_result(self, result: JobResult) -> None:
        """Print and log the result, and rewrite the report."""
        self.results.append(result)
        name, duration = result.job.name, f"{result.duration:.1f} s"
        print(f"{result.status:12} {duration:>8}  {name}  {result.failure_message}", flush=True)
        with (self.output_dir / f"{self.suite}.log").open("a") as file:
            file.write(f"\n===== {name}: {result.status}, {duration}\n{truncate_log(result.output)}")
        self.report_path.write_text(self.format_report())

    def format_success_count(self) -> str:
        return f"{sum(result.succeeded for result in self.results)} of {len(self.results)} jobs succeeded"

    def format_report(self) -> str:
        """Markdown: a table of all jobs, and the last output lines of some."""
        report = f"# {self.suite}\n\n{self.environment}\n\n{self.format_success_count()}.\n\n"
        report += "| Job | Status | Seconds | Message |\n|---|---|---|---|\n"
        for result in self.results:
            message = result.failure_message.replace("|", "\\|")
            report += f"| {result.job.name} | {result.status} | {result.duration:.1f} | {message} |\n"
        for result in self.results:
            if num_lines := result.job.num_report_lines if result.succeeded else NUM_FAILURE_LINES:
                lines = [line[:400] for line in result.output.splitlines()[-num_lines:]]
                report += f"\n## {result.job.name}\n\n```\n" + "\n".join(lines) + "\n```\n"
        return report


def wait_for_exit(process: subprocess.Popen[bytes], job: Job, deadline: float) -> str:
    """Wait for the process, interrupt it if the job requires this, and abort it at the deadline. Returns the status."""
    interrupted = False
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(timeout=0.2)
            expected = 130 if job.interrupt_file else 0
            return "ok" if exit_code == expected else f"exit {exit_code}"
        if job.interrupt_file and not interrupted and Path(job.interrupt_file).exists():
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.killpg(process.pid, signal.SIGABRT)  # faulthandler, if enabled, prints the Python stack
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    return "timeout"


def truncate_log(text: str) -> str:
    """Beginning and end of a long log."""
    half = MAX_LOG_CHARS // 2
    return text if len(text) <= MAX_LOG_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"
