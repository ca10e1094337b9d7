"""Prefetcher: builds the micro-batches of the next step while the current step trains."""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch.profiler import record_function

from tunekit import devices
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Batch

DATA_WAIT = "tunekit::data"  # in profiler traces


class Prefetcher:
    """Returns the steps from `start` to before `end` in order. A thread builds one step in advance.

    The thread lives as long as the `with` block. Its exceptions are raised by the `next` that returns the step. On a
    GPU, micro-batches are in pinned memory.
    """

    def __init__(self, data: DataLoader, device: torch.device) -> None:
        self.data, self.pin_memory = data, devices.is_pinned_on(device)
        self.step = self.end = 0
        self.data_time = 0.0  # seconds that the last `next` waited
        self.thread: ThreadPoolExecutor | None = None
        self.future: Future[list[Batch]] | None = None

    def start(self, step: int, end: int) -> "Prefetcher":
        """Set the first step, and the step to stop before."""
        self.step, self.end = step, end
        return self

    def __enter__(self) -> "Prefetcher":
        self.thread = ThreadPoolExecutor(1, "tunekit-data")
        self.resume()
        return self

    def __exit__(self, *error: object) -> None:
        assert self.thread is not None
        self.data.close()  # interrupts the thread
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.thread = self.future = None

    def resume(self) -> None:
        """Start to build the next step, if there is one."""
        if self.thread is not None and self.step < self.end:
            self.future = self.thread.submit(self.load_step, self.step)

    def pause(self) -> None:
        """Discard the prefetched step, so that other code may use the data until `resume`."""
        if self.future is not None:
            wait([self.future])
        self.future = None

    def load_step(self, step: int) -> list[Batch]:
        """Build the micro-batches of a step. Runs in the thread."""
        batches = self.data[step]
        return [batch.pin_memory() for batch in batches] if self.pin_memory else batches

    def next(self) -> list[Batch]:
        """Return the micro-batches of the next step."""
        assert self.future is not None, "no step is left"
        start_time = time.perf_counter()
        with record_function(DATA_WAIT):
            batches = self.future.result()
        self.data_time = time.perf_counter() - start_time
        self.step += 1
        self.resume()
        return batches

    def state_dict(self) -> dict[str, Any]:
        """State of the data after the last returned step. The prefetched step does not count."""
        return self.data.state_dict(self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state)
