"""Time and memory of this process while a block runs."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tunekit.system import read_memory_field

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SAMPLE_INTERVAL = 0.002  # seconds


def read_memory(field: str) -> int:
    """Bytes in a field of /proc/self/status: VmRSS (resident), VmHWM (peak), RssAnon (private), RssFile (mapped)."""
    size = read_memory_field(STATUS, field)
    assert size is not None, f"{STATUS} has no field {field}"
    return size


class ResourceUsage:
    """Wall time, CPU time and peak memory of a `with` block; the peak is relative to the memory before the block."""

    def __enter__(self) -> Self:
        CLEAR_REFS.write_text("5")  # reset VmHWM
        self.initial_bytes = read_memory("VmRSS")
        self.start, self.cpu_start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.cpu_start
        self.peak_bytes = read_memory("VmHWM") - self.initial_bytes


def measure_usage(fn: Callable[[], object]) -> ResourceUsage:
    with ResourceUsage() as usage:
        fn()
    return usage


class MemorySampler:
    """Peak growth of fields of /proc/self/status in a `with` block, by sampling: only VmHWM has a peak counter."""

    def __init__(self, *fields: str) -> None:
        self.initial = {field: read_memory(field) for field in fields}
        self.peak, self.stop = dict(self.initial), threading.Event()
        self.thread = threading.Thread(target=self.sample)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()

    def sample(self) -> None:
        while not self.stop.wait(SAMPLE_INTERVAL):
            self.peak = {field: max(peak, read_memory(field)) for field, peak in self.peak.items()}

    @property
    def growth(self) -> dict[str, int]:
        """Bytes by field."""
        return {field: peak - self.initial[field] for field, peak in self.peak.items()}
