"""Processes that make rows documents: they answer in order, are never far ahead, and do not outlive who asked them."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess import user_modules
from tunekit.data.preprocess.tokenized_dataset import TokenizedChunk
from tunekit.data.readers.row_reader import RowChunk
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

AHEAD = 3  # chunks for each process that may be begun or done behind the one that is waited for
PATIENCE = 120.0  # seconds for a chunk, which takes about one; then its rows are tried one by one
ROW_PATIENCE = 60.0  # seconds for a row
START = 60.0  # seconds until a process is ready
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container, where it has one
MOST = 32  # processes: who hands out chunks and writes what comes back has no time for more

Task = tuple[list[user_modules.UserModule], bytes]


class WorkerProcess:
    """One process, and the chunk that it is at."""

    def __init__(self, task: Task) -> None:
        self.pipe, other = connection.Pipe()
        here = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
        alone = {"PYTHONPATH": here, "TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(ONE_THREAD, "1")}
        line = [sys.executable, "-P", "-m", "tunekit.data.preprocess.worker", str(other.fileno())]
        # A group of its own: Ctrl-C is for who waits. The end that others hold must not live on in this process.
        with other:
            self.process = subprocess.Popen(
                line, env=os.environ | alone, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], process_group=0
            )
        self.ready, self.number, self.since = False, -1, time.monotonic()
        self.chunk: RowChunk | None = None
        self.say(task)

    def ask(self, number: int, chunk: RowChunk, alone: bool = False) -> None:
        """Give it a chunk; `alone`: row by row, with a word before each."""
        self.number, self.chunk, self.since = number, chunk, time.monotonic()
        self.say((chunk, alone))

    def say(self, words: Any) -> None:
        try:
            self.pipe.send(words)
        except ConnectionError:
            raise UserError(self.death()) from None

    def hear(self) -> Any:
        """What it says: None when it is ready, then an answer to each chunk. UserError if it has died."""
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise UserError(self.death()) from None
        if not self.ready and isinstance(said, UserError):
            raise said
        self.ready = True
        return said

    def death(self) -> str:
        """What became of it, and at which rows."""
        code = self.process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self.chunk is None:
            return f"a process that prepares rows {how} before it began; `num_proc: 0` does without"
        rows = list(self.chunk.rows())
        place = f"{rows[0].where} and the {len(rows) - 1:,} rows behind it" if rows else "no rows"
        hint = "; if memory ran out, set `num_proc` to fewer" if code == -signal.SIGKILL else ""
        return f"{place}: the process that prepared them {how}{hint}"

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class WorkerPool:
    """What chunks become, by `count` processes, in the order of the chunks. The processes live inside the `with`."""

    def __init__(self, rows: DatasetConfig, tokenizer: Tokenizer, chunks: Iterable[RowChunk], count: int) -> None:
        modules = [module for module in user_modules.user_modules(rows) if not module.findable]
        self.task: Task = modules, pickle.dumps((rows, tokenizer))
        self.chunks, self.count, self.workers = iter(chunks), count, []
        self.answers: dict[int, TokenizedChunk | UserError] = {}
        self.given = self.told = 0

    def __enter__(self) -> "WorkerPool":
        with ExitStack() as stack:
            stack.callback(self.__exit__)
            for _ in range(self.count):
                self.workers.append(WorkerProcess(self.task))
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.stop()

    def __iter__(self) -> Iterator[TokenizedChunk]:
        while True:
            self.hear()
            self.give()
            if self.told in self.answers:
                answer = self.answers.pop(self.told)
                self.told += 1
                if isinstance(answer, UserError):
                    raise answer
                yield answer
            elif self.told == self.given and all(worker.ready for worker in self.workers):
                return

    def give(self) -> None:
        """A chunk to each that has none, as long as answers are taken."""
        for worker in self.workers:
            if worker.ready and worker.chunk is None and self.given - self.told < AHEAD * self.count:
                chunk = self.next()
                if chunk is None:
                    return
                worker.ask(self.given, chunk)
                self.given += 1

    def next(self) -> RowChunk | None:
        """A mistake that is found while chunks are read is told in its turn, as those in rows are."""
        try:
            return next(self.chunks, None)
        except UserError as error:
            self.answers[self.given] = error
            self.given, self.chunks = self.given + 1, iter(())
            return None

    def hear(self) -> None:
        """Take what has been answered; wait for something if nothing can be told otherwise."""
        busy = {worker.pipe: worker for worker in self.workers if worker.chunk is not None or not worker.ready}
        if not busy:
            return
        left = min(worker.since for worker in busy.values()) + PATIENCE - time.monotonic()
        for pipe in connection.wait(list(busy), 0.0 if self.told in self.answers else max(left, 0.1)):
            self.take(busy[pipe])
        for worker in busy.values():
            if worker.chunk is not None and time.monotonic() - worker.since > PATIENCE:
                self.answers[worker.number] = self.search(worker)

    def take(self, worker: WorkerProcess) -> None:
        said = worker.hear()
        if said is not None:
            self.answers[worker.number], worker.chunk = said, None

    def search(self, slow: WorkerProcess) -> TokenizedChunk | UserError:
        """The answer of a process that takes very long, row by row by another one; or which row it hangs at."""
        assert slow.chunk is not None
        slow.stop()
        self.workers[self.workers.index(slow)] = other = WorkerProcess(self.task)
        other.ask(slow.number, slow.chunk, alone=True)
        where = "a row"
        while other.pipe.poll(ROW_PATIENCE if other.ready else START):
            said = other.hear()
            if isinstance(said, str):
                where = said
            elif said is not None:
                other.chunk = None
                return said
        other.stop()
        self.workers.remove(other)
        return UserError(f"{where}: it takes more than {ROW_PATIENCE:.0f} seconds to prepare; take the row out")


def num_cpus() -> int:
    """How many this process may use at a time."""
    count = len(os.sched_getaffinity(0))
    words = CPU_LIMIT.read_text().split() if CPU_LIMIT.is_file() else ["max"]
    return count if words[0] == "max" else max(1, min(count, int(words[0]) // int(words[1])))
