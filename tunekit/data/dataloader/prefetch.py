"""The micro-batches of the next step are made while this one trains."""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from tunekit import devices
from tunekit.data.dataloader.batch import Batch

DATA_WAIT = "tunekit::data"  # in profiler traces


class BatchSource(Protocol):
    """Micro-batches by step, and what must be kept to go on from a step."""

    def __getitem__(self, step: int) -> list[Batch]: ...

    def state_dict(self, step: int) -> dict[str, Any]:
        """What to keep when `step` steps are done."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def row_locations(self, step: int) -> list[str]:
        """Files and lines of the rows of a step, on all ranks. The step was read not long ago."""
        ...

    def close(self) -> None: ...


class Prefetcher:
    """Hands out steps `start` to before `end` in turn, one of them made in advance by a thread.

    The thread lives inside the `with` alone. What goes wrong in it is raised where its step is asked for. On a GPU the
    micro-batches lie in pinned memory, from which it copies while it computes.
    """

    def __init__(self, data: BatchSource, device: torch.device) -> None:
        self.data, self.pin = data, devices.is_pinned_on(device)
        self.taken = self.end = 0
        self.data_time = 0.0  # seconds that the step handed out last was waited for
        self.thread: ThreadPoolExecutor | None = None
        self.future: Future[list[Batch]] | None = None

    def start(self, start: int, end: int) -> "Prefetcher":
        """From which step on, and to which."""
        self.taken, self.end = start, end
        return self

    def __enter__(self) -> "Prefetcher":
        self.thread = ThreadPoolExecutor(1, "tunekit-data")
        self.resume()
        return self

    def __exit__(self, *error: object) -> None:
        assert self.thread is not None
        self.data.close()  # what the thread is at ends early
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.thread = self.future = None

    def resume(self) -> None:
        """Have the next step made, if there is one."""
        if self.thread is not None and self.taken < self.end:
            self.future = self.thread.submit(self.made, self.taken)

    def pause(self) -> None:
        """Let go of what was made in advance, until `begin`: others may use the data meanwhile."""
        if self.future is not None:
            wait([self.future])
        self.future = None

    def made(self, step: int) -> list[Batch]:
        batches = self.data[step]
        return [batch.pin_memory() for batch in batches] if self.pin else batches

    def next(self) -> list[Batch]:
        """The micro-batches of the next step."""
        assert self.future is not None, "no step is left"
        began = time.perf_counter()
        with record_function(DATA_WAIT):
            batches = self.future.result()
        self.data_time = time.perf_counter() - began
        self.taken += 1
        self.resume()
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Of the data behind the steps that were handed out, whatever the thread is at."""
        return self.data.state_dict(self.taken)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state)
