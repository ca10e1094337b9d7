"""A recipe without torch, whose ranks start at once: each adds beads to a string, all of them one at a time.

They wait for each other through files, as ranks do through exchanges. What goes wrong, where and how often, the config
says. `Beads.start` leaves out the look at the config before, which imports torch: `look=True` takes it.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.outcome import CommandResult
from tests.waiting import TIMEOUT_SECONDS

RECIPE = '''"""Beads on a string."""

import atexit
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import RunStopped, UserError
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.heartbeat import HeartbeatWriter


@dataclass(frozen=True)
class Beads:
    output_dir: str = "out"
    beads: int = 4
    ends: bool = False
    bad: str = ""  # what goes wrong at bead 2
    who: int = 1
    once: bool = True  # only the first time
    slow: float = 0.0  # seconds before anything is listened to
    parallel: ParallelConfig = ParallelConfig()
    device: str = "cpu"


CONFIG = Beads


def check(cfg):
    if cfg.beads == 1001:
        raise UserError(f"beads: {cfg.beads} are too many")


def go_wrong(bad):
    print("about to go wrong", flush=True)
    if bad == "error":
        raise ValueError("a bead is lost")
    if bad == "late":
        atexit.register(time.sleep, 4)
    if bad in ("mistake", "late"):
        raise UserError("the string is too short: take another one")
    if bad == "code":
        os._exit(7)
    if bad in ("SIGKILL", "SIGSEGV", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, bad))
    time.sleep(1000)


def wait_for_all(folder, bead, rank, size):
    (folder / f"{bead}.{rank}").touch()
    while not all((folder / f"{bead}.{other}").exists() for other in range(size)):
        time.sleep(0.005)


def leave_together(out, rank, bead, asked):
    """A wish reaches ranks at different beads, which are one apart at most: all leave behind the next but one."""
    if asked and not (out / f"wish.{rank}").exists():
        (out / f"wish.{rank}").write_text(f"{bead + 2} {int(asked[0])}")
        with contextlib.suppress(FileExistsError):
            os.link(out / f"wish.{rank}", out / "leave")
    if (out / "leave").exists():
        last, number = map(int, (out / "leave").read_text().split())
        if bead >= last:
            raise RunStopped(f"stopped by {signal.Signals(number).name} after {bead + 1}", 128 + number)


def main(cfg, overwrite=False):
    rank, size, asked = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), []
    beats, out = HeartbeatWriter.open(), Path(cfg.output_dir)
    if (out / "final").exists():
        print("nothing is left to do")
        return
    out.mkdir(exist_ok=True)
    with (out / "starts").open("a") as file:
        local, threads = os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"]
        file.write(f"{rank} {size} {os.getpid()} {local} {threads} {overwrite}\\n")
    print(f"rank {rank} is here", flush=True)
    print(f"rank {rank} warns", file=sys.stderr, flush=True)
    time.sleep(cfg.slow)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(signal.Signals(number)))
    (out / f"listens.{rank}").touch()
    string = out / f"string.{rank}"
    begin = 0 if overwrite or not string.exists() else int(string.read_text())
    for bead in range(begin, cfg.beads):
        beats.beat(bead, "step")
        if bead == 2 and rank == cfg.who and cfg.bad and not (cfg.once and (out / "wrong").exists()):
            (out / "wrong").touch()
            go_wrong(cfg.bad)
        wait_for_all(out, bead, rank, size)
        (out / f"new.{rank}").write_text(str(bead + 1))
        (out / f"new.{rank}").rename(string)  # whole at any time
        leave_together(out, rank, bead, asked)
        if cfg.beads > 100:
            time.sleep(0.05)
    if rank == 0 and cfg.ends:
        from tunekit.checkpoint import atomic  # which imports torch

        with atomic.AtomicDir(out / "final") as folder:
            (folder / "beads").write_text(str(cfg.beads))
        (out / "config.yaml").touch()
'''
# `tune run` of a config that is known to be right. Where the whole machine stands still, its clock does so too: a limit
# of a few seconds says that ranks are silent, not that nobody could speak.
STARTER = """
import sys
import time

def steady(now=time.monotonic, most=1.0):
    seen = [now(), 0.0]

    def passed():
        last, seen[0] = seen[0], now()
        seen[1] += min(seen[0] - last, most)
        return begin + seen[1]

    begin = seen[0]
    return passed

time.monotonic = steady()
from tunekit.cli import main as cli
from tunekit.distributed import launch_workers

def found_out(words, wishes):
    words = dict(word.partition("=")[::2] for word in words)
    limit = float(words.get("parallel.hang_timeout_seconds", 60))
    return {"folder": words.get("output_dir", "out"), "finished": False, "digest": words.get("beads"), "timeout": limit}

launch_workers.check_in_subprocess = found_out
sys.exit(cli.main())
"""


@dataclass(frozen=True)
class Started:
    """One start of one rank, as it told itself."""

    rank: int
    size: int
    pid: int
    local: int
    threads: int
    overwrite: bool


@dataclass(frozen=True)
class Beads:
    """A folder with the recipe and its config, where `tune` runs."""

    folder: Path
    within: tuple[str, ...] = ()  # what runs the command

    @classmethod
    def make(cls, folder: Path) -> "Beads":
        (folder / "beads.py").write_text(RECIPE)
        (folder / "beads.yaml").write_text("beads: 4\n")
        return cls(folder)

    def start(self, *words: str, look: bool = False, **environment: str) -> subprocess.Popen[str]:
        """`tune run beads` with these words."""
        left = {name: word for name, word in os.environ.items() if name != "OMP_NUM_THREADS"}
        program = ["-m", "tunekit.cli"] if look else ["-c", STARTER]
        command = [*self.within, sys.executable, "-P", *program, "run", "beads.py", "beads", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=left | environment, start_new_session=True, **pipes)

    def run(self, *words: str, look: bool = False, **environment: str) -> CommandResult:
        return self.end(self.start(*words, look=look, **environment))

    def end(self, process: subprocess.Popen[str]) -> CommandResult:
        try:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()
        return CommandResult(process.returncode, out, err)

    def started(self, out: str = "out") -> list[Started]:
        file = self.folder / out / "starts"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [Started(*map(int, words[:5]), words[5] == "True") for words in map(str.split, lines)]

    def strings(self, count: int) -> list[int]:
        """How far each rank has come."""
        return [int((self.folder / f"out/string.{rank}").read_text()) for rank in range(count)]

    def log(self, rank: int) -> str:
        return (self.folder / f"out/logs/rank-{rank}.log").read_text()


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() or ["Z"])[0] == "Z"
