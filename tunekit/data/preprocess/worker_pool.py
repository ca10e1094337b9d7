"""Pool of worker processes that tokenize chunks of rows. Results come in order; workers end with the pool."""

import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess import user_modules
from tunekit.data.preprocess.tokenized_dataset import TokenizedChunk
from tunekit.data.preprocess.worker import PROGRESS_BYTES
from tunekit.data.readers.row_reader import RowChunk
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

MAX_CHUNKS_AHEAD = 3  # chunks per worker that may be started after the one whose result comes next
ROW_TIMEOUT = 60.0  # seconds for a row, or for the tokenizer on all rows of a chunk
CHECK_INTERVAL = 1.0  # seconds between two looks at the progress of the workers
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # CPU limit of a container
MAX_WORKERS = 32  # the process that sends chunks and writes results cannot serve more

Task = tuple[list[user_modules.UserModule], bytes]


class WorkerProcess:
    """A worker process, and the chunk that it tokenizes."""

    def __init__(self, task: Task) -> None:
        self.pipe, child_pipe = connection.Pipe()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        env = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(THREAD_VARIABLES, "1")}
        progress_file = tempfile.TemporaryFile()  # noqa: SIM115
        progress_file.truncate(PROGRESS_BYTES)
        self.progress = memoryview(mmap.mmap(progress_file.fileno(), PROGRESS_BYTES)).cast("q")  # written by the worker
        fds = child_pipe.fileno(), progress_file.fileno()
        command = [sys.executable, "-P", "-m", "tunekit.data.preprocess.worker", *map(str, fds)]
        # In its own process group, so that Ctrl-C only reaches this process. The child's end of the pipe is closed
        # here, so that a worker that has died is noticed.
        with child_pipe, progress_file:
            self.process = subprocess.Popen(
                command, env=os.environ | env, stdin=subprocess.DEVNULL, pass_fds=fds, process_group=0
            )
        self.ready, self.chunk_index = False, -1
        self.chunk: RowChunk | None = None
        self.position, self.position_time = (-1, 0), time.monotonic()  # the last chunk and row that were seen
        self.send(task)

    def submit(self, chunk_index: int, chunk: RowChunk) -> None:
        """Send a chunk."""
        self.chunk_index, self.chunk = chunk_index, chunk
        self.send(chunk)

    def send(self, message: Any) -> None:
        """Send a message. Raise UserError if the worker has died."""
        try:
            self.pipe.send(message)
        except ConnectionError:
            raise UserError(self.describe_exit()) from None

    def receive(self) -> Any:
        """Receive None when the worker is ready, later the result of a chunk. Raise UserError if it has died."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):  # OSError: it has died while it sent a message
            raise UserError(self.describe_exit()) from None
        if not self.ready and isinstance(message, UserError):
            raise message
        self.ready = True
        return message

    def describe_exit(self) -> str:
        """Exit status of a dead worker, and its rows."""
        code = self.process.wait()
        status = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if self.chunk is None:
            return f"data.num_proc: a preprocessing worker {status} during startup. Set num_proc=0."
        hint = ". If memory ran out, set a lower num_proc" if code == -signal.SIGKILL else ""
        return f"{self.chunk_location()}: the preprocessing worker {status}{hint}"

    def chunk_location(self) -> str:
        """Location of the rows of the current chunk."""
        rows = [] if self.chunk is None else list(self.chunk.rows())
        return f"{rows[0].where} and the next {len(rows) - 1:,} rows" if rows else "no rows"

    def check_progress(self) -> None:
        """Raise UserError if a row takes too long."""
        position, now = (self.chunk_index, self.progress[0]), time.monotonic()
        if self.chunk is None or position != self.position:
            self.position, self.position_time = position, now
        elif now - self.position_time > ROW_TIMEOUT:
            row = next(islice(self.chunk.rows(), self.progress[0], None), None)
            location = self.chunk_location() if row is None else row.where
            raise UserError(f"{location}: preprocessing took more than {ROW_TIMEOUT:.0f} seconds. Remove the row.")

    def stop(self) -> None:
        """Kill the worker."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class WorkerPool:
    """Iterator over the tokenized chunks, in the order of `chunks`. The workers live as long as the `with` block."""

    def __init__(
        self, config: DatasetConfig, tokenizer: Tokenizer, chunks: Iterable[RowChunk], num_workers: int
    ) -> None:
        modules = [module for module in user_modules.user_modules(config) if not module.is_importable]
        self.task: Task = modules, pickle.dumps((config, tokenizer))
        self.chunks, self.num_workers, self.workers = iter(chunks), num_workers, []
        self.results: dict[int, TokenizedChunk | UserError] = {}
        self.num_submitted = self.num_returned = 0

    def __enter__(self) -> "WorkerPool":
        with ExitStack() as stack:
            stack.callback(self.__exit__)
            for _ in range(self.num_workers):
                self.workers.append(WorkerProcess(self.task))
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.stop()

    def __iter__(self) -> Iterator[TokenizedChunk]:
        while True:
            self.receive_results()
            self.submit_chunks()
            if self.num_returned in self.results:
                result = self.results.pop(self.num_returned)
                self.num_returned += 1
                if isinstance(result, UserError):
                    raise result
                yield result
            elif self.num_returned == self.num_submitted and all(worker.ready for worker in self.workers):
                return

    def submit_chunks(self) -> None:
        """Send a chunk to each idle worker, unless too many results are waiting."""
        for worker in self.workers:
            num_pending = self.num_submitted - self.num_returned
            if worker.ready and worker.chunk is None and num_pending < MAX_CHUNKS_AHEAD * self.num_workers:
                chunk = self.next_chunk()
                if chunk is None:
                    return
                worker.submit(self.num_submitted, chunk)
                self.num_submitted += 1

    def next_chunk(self) -> RowChunk | None:
        """Read the next chunk. A UserError of the reader becomes a result, to be raised in its turn."""
        try:
            return next(self.chunks, None)
        except UserError as error:
            self.results[self.num_submitted] = error
            self.num_submitted, self.chunks = self.num_submitted + 1, iter(())
            return None

    def receive_results(self) -> None:
        """Receive available results. Wait for one if the next result to return is missing."""
        busy = {worker.pipe: worker for worker in self.workers if worker.chunk is not None or not worker.ready}
        if not busy:
            return
        timeout = 0.0 if self.num_returned in self.results else CHECK_INTERVAL
        for pipe in connection.wait(list(busy), timeout):
            message = busy[pipe].receive()
            if message is not None:
                self.results[busy[pipe].chunk_index], busy[pipe].chunk = message, None
        for worker in busy.values():
            worker.check_progress()


def num_cpus() -> int:
    """Number of CPUs that this process may use."""
    count = len(os.sched_getaffinity(0))
    quota, *period = CPU_LIMIT.read_text().split() if CPU_LIMIT.is_file() else ["max"]
    return count if quota == "max" else max(1, min(count, int(quota) // int(period[0])))
