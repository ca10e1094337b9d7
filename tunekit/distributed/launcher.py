"""The ranks of this machine: started, listened to, ended, and started again. Nothing here imports torch.

Whatever ends one rank ends all: the others may wait for it without end.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tunekit.distributed import flight_recorder, worker_env
from tunekit.distributed.flight_recorder import PREFIX, Recorders, variables
from tunekit.distributed.heartbeat import ANSWER, HeartbeatMonitor, find_stalled_rank, rank_status
from tunekit.distributed.launch_config import End, Place, WorkerSpec
from tunekit.distributed.signals import ASKED, STOP, TICK, stop_reason
from tunekit.errors import UserError

LOGS = "logs"  # below the folder of the run
GRACE = 2.0  # seconds in which ranks end by themselves once one has
LEAVING = 10.0  # seconds in which one that has told its mistake leaves: on a busy machine Python ends slowly
MISTAKE = f"{UserError.__name__}: "
LONG = 15.0  # seconds after which a start is said to go on
STARTING = {"": "torch and the recipe are imported", "prepare": "rows are prepared", "load": "weights are read"}
SHOWN = 30  # lines of what a rank has printed that are shown
# Signals with which a process ends in the wake of another one's failure.
WAKE = {-signal.SIGABRT, -signal.SIGPIPE}


def print_line(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def tune_command(words: tuple[str, ...]) -> list[str]:
    """`tune` with these words, in a process of its own."""
    return [sys.executable, "-P", "-m", "tunekit.cli", *words]


class Ranks:
    """The processes of one start."""

    def __init__(self, job: WorkerSpec, place: Place) -> None:
        self.job, self.place = job, place
        self.board = HeartbeatMonitor(job.asked.count)
        self.logs = [opened(job.folder, place, slot) for slot in range(job.asked.count)]
        logs = None if job.folder is None else job.folder / LOGS
        self.recorders = None if logs is None else Recorders(logs, place.base, job.asked.count)
        self.begins = [os.lseek(file, 0, os.SEEK_END) for file in self.logs]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sent: list[signal.Signals] = []
        self.told: set[str] = set()  # phases

    def __enter__(self) -> "Ranks":
        for slot in range(self.job.asked.count):
            self.processes.append(self.start(slot))
        if self.place.listener is not None:
            os.close(self.place.listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.board.close()
        if self.recorders is not None:
            self.recorders.close()
        for file in self.logs:
            os.close(file)

    def start(self, slot: int) -> subprocess.Popen[bytes]:
        """Start a rank: its group of processes is its own, or Ctrl-C in a terminal would reach it twice."""
        plain, log = self.place.base + slot == 0, self.logs[slot]
        listener = [] if self.place.listener is None else [self.place.listener]
        env = environment(self.job, self.place, slot) | self.board.environment(slot) | {worker_env.LOG: str(log)}
        env |= {} if self.recorders is None else self.recorders.environment(slot)
        recorders = () if self.recorders is None else self.recorders.files
        return subprocess.Popen(
            tune_command((*self.job.words, *(["--overwrite"] if self.job.fresh and self.place.first else []))),
            stdin=subprocess.DEVNULL,
            stdout=None if plain else log,
            stderr=None if plain else log,
            env=env,
            pass_fds=(*self.board.files, *recorders, log, *(listener if plain else [])),
            start_new_session=True,
        )

    def send(self, number: signal.Signals) -> None:
        """Hand on what a person asks for."""
        self.sent.append(number)
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """End what is left, with all that it has started."""
        for process in self.processes:
            if process.poll() != 0:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def ended(self) -> End | None:
        """How it ended, if it did: all ranks well, or one of them badly."""
        codes = self.codes()
        if all(fine(code) for code in codes):
            return End("left", max(filter(None, codes))) if any(codes) else End("done")
        late = any(0 < beat.failed < time.monotonic() - GRACE for beat in self.board.beats())
        if late or not all(code is None or fine(code) for code in codes):
            self.settle()
            return self.blame()
        return None

    def settle(self) -> None:
        """Others may be about to tell the same mistake; of anything else it is known who was the first."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < LEAVING:
            codes = self.codes()
            leaving = any(code is None and self.mistaken(slot) for slot, code in enumerate(codes))
            if not leaving and (waited > GRACE or not {2, None} <= set(codes)):
                return
            time.sleep(TICK)

    def mistaken(self, slot: int) -> bool:
        """Whether a rank ends by what a person can mend. It says so before it is gone."""
        return self.codes()[slot] == 2 or self.board.beats()[slot].reason.startswith(MISTAKE)

    def blame(self) -> End:
        """The rank that ended first. One that was killed could not tell when, and no other could have killed it."""
        codes, beats = self.codes(), self.board.beats()
        asked = [-code for code in codes if code is not None and -code in ASKED]
        if asked:  # nobody but a person or a scheduler sends these
            name = stop_reason(signal.Signals(asked[0]), self.job.folder and self.job.folder / STOP)
            return End("asked", 128 + asked[0], f"{name}: ended before the first step; nothing was changed")
        bad = [slot for slot, code in enumerate(codes) if (code is not None and not fine(code)) or beats[slot].failed]
        killed = [slot for slot in bad if (codes[slot] or 0) < 0 and codes[slot] not in WAKE]
        first = killed[0] if killed else min(bad, key=lambda slot: beats[slot].failed or float("inf"))
        return self.mistake(first) if first not in killed and self.mistaken(first) else self.failed(first)

    def mistake(self, slot: int) -> End:
        """One line, whoever made it. Rank 0 tells its own."""
        told = len(self.place.names) < 2 and self.codes()[0] == 2
        return End("mistake", 2, "" if told else self.board.beats()[slot].reason.partition(": ")[2])

    def failed(self, slot: int) -> End:
        rank, code = self.place.base + slot, self.codes()[slot]
        for line in self.last(slot):
            print_line(f"rank {rank}: {line}")
        reason = self.board.beats()[slot].reason
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += ": as the system does when memory runs out" if code == -signal.SIGKILL else ""
        else:
            how = f"failed: {reason}" if reason else f"ended with exit code {code}"
        return End("failed", 1, f"rank {rank} {how}")

    def last(self, slot: int) -> list[str]:
        """The last lines that a rank has printed since its start."""
        file, begin = self.logs[slot], self.begins[slot]
        text = os.pread(file, os.fstat(file).st_size - begin, begin).decode(errors="replace")
        return text.splitlines()[-SHOWN:]

    def doing(self) -> str | None:
        """What the first of all ranks does before its first step, once for each phase that a person waits for."""
        beat = self.board.beats()[0]
        if beat.phase not in STARTING or beat.phase in self.told or time.monotonic() - self.board.began < LONG:
            return None
        self.told.add(beat.phase)
        return f"still starting: {STARTING[beat.phase]}" if self.place.base == 0 else None

    def hangs(self) -> End | None:
        """Which rank is where, if none has gone on for too long."""
        return End("hung", 1, self.places()) if self.board.silent(self.job.timeout) else None

    def places(self) -> str:
        """Which rank is where, from their stacks. Some may have ended well before the others hung."""
        base, beats, codes = self.place.base, self.board.beats(), self.codes()
        stacks = self.board.ask([p.pid for p, code in zip(self.processes, codes, strict=True) if code is None])
        found = [
            rank_status(base + slot, beats[slot], stack) for slot, stack in enumerate(stacks) if codes[slot] is None
        ]
        text = find_stalled_rank(found, self.job.timeout)
        if self.job.folder is None or self.recorders is None:
            return text
        self.recorders.request(ANSWER)
        ranks = [base + slot for slot, code in enumerate(codes) if code is None]
        file = self.job.folder / LOGS / f"stacks-{base}.txt"
        file.write_text("\n".join(f"rank {base + slot}\n{stack}" for slot, stack in enumerate(stacks)))
        text = f"{text}; the stacks of all are in {file}"
        return "\n".join([text, *flight_recorder.quote(self.job.folder / LOGS, ranks)])


def environment(job: WorkerSpec, place: Place, slot: int) -> dict[str, str]:
    """What torchrun tells a rank, and what we tell besides. Cores are divided among the ranks unless a person did."""
    rank = place.base + slot
    told = {"RANK": rank, "LOCAL_RANK": slot, "WORLD_SIZE": place.size, "LOCAL_WORLD_SIZE": job.asked.count}
    told |= {"MASTER_ADDR": place.address, "MASTER_PORT": place.port, worker_env.PARENT: os.getpid()}
    told |= {"GROUP_WORLD_SIZE": max(1, len(place.names))}
    if rank == 0 and place.listener is not None:
        told[worker_env.LISTENS] = place.listener
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // job.asked.count))}
    gloo = {"GLOO_SOCKET_IFNAME": place.interface} if place.interface else {}
    recorded = {} if job.folder is None else variables(job.folder / LOGS / PREFIX, os.environ)
    return threads | gloo | recorded | dict(os.environ) | {name: str(word) for name, word in told.items()}


def fine(code: int | None) -> bool:
    """Whether a rank has ended as it should: at the end, or saved, as a person asked."""
    return code == 0 or (code is not None and code - 128 in ASKED)


def opened(folder: Path | None, place: Place, slot: int) -> int:
    """The file for what a rank prints. Rank 0 speaks to the terminal: its own is for what it fails of."""
    if folder is None:
        return os.memfd_create("log")
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    over = os.O_TRUNC if place.first else 0
    return os.open(folder / LOGS / f"rank-{place.base + slot}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | over, 0o644)
