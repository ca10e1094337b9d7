"""Steps of constant shapes on tensors of fixed address, which are replayed as CUDA graphs."""

import sys
import warnings
from collections.abc import Callable, Hashable
from functools import cache as cached_once
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from tunekit.devices import device_capabilities
from tunekit.models.decoder import Decoder

Step = Callable[[], None]
WARMUP_STEPS = 2  # the first one loads kernels, the second one shows whether anything still waits for the host
# Warnings of torch's debug mode: of each wait, and once per process that the mode does not detect all of them.
WAIT, NOTICE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype feature"
MIN_REPLAYS = 8  # a capture costs about as much as three eager steps


class StepGraph:
    """Runs a step: eagerly at first, then as a captured graph while its key stays the same."""

    def __init__(
        self,
        step: Step,
        capture: Callable[[Step], Step] | None,
        where: str = "generation",
        captured: set[Hashable] | None = None,
        warmup_steps: int = WARMUP_STEPS,
    ) -> None:
        self.step, self.capture, self.where, self.warmup_steps = step, capture, where, warmup_steps
        self.captured = set() if captured is None else captured  # keys that need no eager steps before another capture
        self.replay: Step | None = None
        self.key: Hashable = None
        self.num_eager = 0

    def run(self, key: Hashable, num_left: int) -> None:
        """Run the step once. `key` identifies its shapes and operators; a graph is valid for one key."""
        if key != self.key:
            self.key, self.num_eager, self.replay = key, WARMUP_STEPS, None
            if key not in self.captured:
                self.num_eager -= self.warmup_steps
        if self.replay is None and self.capture is not None and self.num_eager >= WARMUP_STEPS:
            self.replay = self.capture(self.step) if num_left >= MIN_REPLAYS else None
        if self.replay is not None:
            self.captured.add(key)
            self.replay()
            return
        self.num_eager += 1
        if self.capture is not None and self.num_eager == WARMUP_STEPS and run_detecting_waits(self.step):
            warn_eager(self.where, "a layer waits for the device in each step")
            self.capture = None
        elif self.capture is None or self.num_eager != WARMUP_STEPS:
            self.step()


def is_sharded(model: Decoder) -> bool:
    """Whether the weights are divided among processes."""
    return isinstance(model, FSDPModule) or bool(model.shards)


def get_capture(model: Decoder) -> Callable[[Step], Step] | None:
    """Function that captures steps of a model as a graph; None if they run eagerly."""
    if not device_capabilities(model.device).graphs:
        return None
    if is_sharded(model):
        warn_eager("generation", "weights are divided among processes")
        return None
    return partial(capture_cuda_graph, torch.cuda.graph_pool_handle())


def capture_cuda_graph(pool: Any, step: Step) -> Step:
    """Record the kernels of a step without running them. Returns a function that replays the graph.

    Graphs that never run at the same time share a memory pool: intermediate tensors of one overwrite those of another.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate pinned memory at any time, which a global capture would forbid.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay


def run_detecting_waits(step: Step) -> bool:
    """Run a step. Returns whether it synchronized with the device, which cannot be captured."""
    if not torch.cuda.is_available():
        step()
        return False
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    kinds = [find_kind(str(warning.message)) for warning in caught]
    for warning, kind in zip(caught, kinds, strict=True):
        if kind is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return WAIT in kinds


def find_kind(message: str) -> str | None:
    """Kind of a warning of the debug mode; None for other warnings."""
    return next((text for text in (WAIT, NOTICE) if text in message), None)


@cached_once
def warn_eager(where: str, reason: str) -> None:
    """Print once per reason that no graph is captured."""
    print(f"warning: {where}: no CUDA graph is used: {reason}. Results are the same, only slower.", file=sys.stderr)
