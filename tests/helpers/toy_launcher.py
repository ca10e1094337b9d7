"""A recipe without torch whose ranks start immediately, and `tune run` for it.

Ranks count steps and wait for each other through files, as in collective operations. The config injects faults.
`ToyLauncher.start` skips the config check, which imports torch, unless `check=True`.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.helpers.command_result import CommandResult
from tests.helpers.forked_ranks import end_tune, start_tune
from tests.helpers.wait import TIMEOUT_SECONDS

RECIPE = '''"""Ranks that count steps together."""

import atexit
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import RunStopped, UserError
from tunekit.distributed import worker_env
from tunekit.distributed.heartbeat import HeartbeatWriter

if worker_env.is_tune_worker():

    @dataclass(frozen=True)
    class ParallelConfig:
        """Replacement in the ranks, because that of tunekit imports torch."""

        hang_timeout_seconds: float = 60.0

else:
    from tunekit.distributed.parallel_dims import ParallelConfig


@dataclass(frozen=True)
class ToyConfig:
    output_dir: str = "out"
    steps: int = 4
    save: bool = False  # write a final checkpoint
    fault: str = ""  # fault in step 2
    fault_rank: int = 1
    once: bool = True  # only in the first start
    slow: float = 0.0  # seconds before signal handlers are installed
    parallel: ParallelConfig = ParallelConfig()
    device: str = "cpu"


CONFIG = ToyConfig


def check(cfg):
    if cfg.steps == 1001:
        raise UserError(f"steps: must be at most 1000, got {cfg.steps}")


def fail(fault):
    print("about to fail", flush=True)
    if fault == "error":
        raise ValueError("toy error")
    if fault == "late":
        atexit.register(time.sleep, 3)
    if fault in ("user_error", "late"):
        raise UserError("toy: user error")
    if fault == "code":
        os._exit(7)
    if fault in ("SIGKILL", "SIGSEGV", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, fault))
    time.sleep(1000)


def wait_for_all(folder, step, rank, size):
    (folder / f"{step}.{rank}").touch()
    for path in [str(folder / f"{step}.{other}") for other in range(size)]:
        while not os.access(path, os.F_OK):  # calls no Python function: the stack of a hang ends here
            time.sleep(0.005)


def stop_together(out, rank, step, received):
    """Ranks receive a signal at most one step apart. All of them stop after the second next step."""
    if received and not (out / f"stop_request.{rank}").exists():
        (out / f"stop_request.{rank}").write_text(f"{step + 2} {int(received[0])}")
        with contextlib.suppress(FileExistsError):
            os.link(out / f"stop_request.{rank}", out / "stop_at")
    if (out / "stop_at").exists():
        last, number = map(int, (out / "stop_at").read_text().split())
        if step >= last:
            raise RunStopped(f"stopped by {signal.Signals(number).name} after {step + 1}", 128 + number)


def main(cfg, overwrite=False):
    rank, size, received = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), []
    heartbeat, out = HeartbeatWriter.open(), Path(cfg.output_dir)
    if (out / "final").exists():
        print("already complete")
        return
    out.mkdir(exist_ok=True)
    with (out / "starts").open("a") as file:
        local, threads = os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"]
        file.write(f"{rank} {size} {os.getpid()} {local} {threads} {overwrite}\\n")
    print(f"rank {rank} started", flush=True)
    print(f"rank {rank} warns", file=sys.stderr, flush=True)
    time.sleep(cfg.slow)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(signal.Signals(number)))
    (out / f"listens.{rank}").touch()
    progress = out / f"progress.{rank}"
    begin = 0 if overwrite or not progress.exists() else int(progress.read_text())
    for step in range(begin, cfg.steps):
        heartbeat.record(step, "step")
        if step == 2 and rank == cfg.fault_rank and cfg.fault and not (cfg.once and (out / "failed").exists()):
            (out / "failed").touch()
            fail(cfg.fault)
        wait_for_all(out, step, rank, size)
        (out / f"new.{rank}").write_text(str(step + 1))
        (out / f"new.{rank}").rename(progress)  # atomic
        stop_together(out, rank, step, received)
        if cfg.steps > 100:
            time.sleep(0.05)
    if rank == 0 and cfg.save:
        from tunekit.checkpoint import atomic  # which imports torch

        with atomic.AtomicDir(out / "final") as folder:
            (folder / "steps").write_text(str(cfg.steps))
        (out / "config.yaml").touch()
'''
# `tune run` without the config check. Its clock pauses while the whole machine is suspended, so that timeouts of a few
# seconds measure silent ranks only.
STARTER = """
import sys
import time

def make_clock(now=time.monotonic, max_increment=1.0):
    state = [now(), 0.0]

    def clock():
        last, state[0] = state[0], now()
        state[1] += min(state[0] - last, max_increment)
        return start + state[1]

    start = state[0]
    return clock

time.monotonic = make_clock()
from tunekit.cli import main as cli
from tunekit.distributed import launcher

def skip_check(args, launch_config):
    overrides = dict(arg.partition("=")[::2] for arg in args)
    limit = float(overrides.get("parallel.hang_timeout_seconds", 60))
    output_dir, steps = overrides.get("output_dir", "out"), overrides.get("steps")
    return {"folder": output_dir, "finished": False, "digest": steps, "timeout": limit}

launcher.check_in_subprocess = skip_check
sys.exit(cli.main())
"""


@dataclass(frozen=True)
class StartedWorker:
    """A started rank, as it has recorded."""

    rank: int
    size: int
    pid: int
    local: int
    threads: int
    overwrite: bool


@dataclass(frozen=True)
class ToyLauncher:
    """Directory with the recipe and its config, in which `tune` runs."""

    folder: Path
    command_prefix: tuple[str, ...] = ()

    @classmethod
    def make(cls, folder: Path) -> "ToyLauncher":
        (folder / "toy.py").write_text(RECIPE)
        (folder / "toy.yaml").write_text("steps: 4\n")
        return cls(folder)

    def start(self, *args: str, check: bool = False, **environment: str) -> subprocess.Popen[str]:
        """Start `tune run toy.py toy` with `args`."""
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        program = ["-m", "tunekit.cli"] if check else ["-c", STARTER]
        command = [*self.command_prefix, sys.executable, "-P", *program, "run", "toy.py", "toy", *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=inherited | environment, start_new_session=True, **pipes)

    def run(self, *args: str, check: bool = False, **environment: str) -> CommandResult:
        return self.end(self.start(*args, check=check, **environment))

    def run_forked(self, *args: str) -> CommandResult:
        """Run `tune run` with the config check. All its processes are forks."""
        return end_tune(self.start_forked(*args), self.folder)

    def start_forked(self, *args: str) -> ForkServerProcess:
        return start_tune(self.folder, "run", "toy.py", "toy", *args)

    def end(self, process: subprocess.Popen[str]) -> CommandResult:
        try:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()
        return CommandResult(process.returncode, out, err)

    def started_workers(self, out: str = "out") -> list[StartedWorker]:
        file = self.folder / out / "starts"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [StartedWorker(*map(int, fields[:5]), fields[5] == "True") for fields in map(str.split, lines)]

    def progress(self, count: int) -> list[int]:
        """Completed steps of each rank."""
        return [int((self.folder / f"out/progress.{rank}").read_text()) for rank in range(count)]

    def log(self, rank: int) -> str:
        return (self.folder / f"out/logs/rank-{rank}.log").read_text()
