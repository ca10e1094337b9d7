"""Generation token by token: a step of constant shapes on tensors of fixed address, replayed as a CUDA graph."""

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache as cached_once
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tunekit.devices import capabilities
from tunekit.kernels.device_to_host import HostCopy
from tunekit.models.decoder import Decoder
from tunekit.models.forward_context import KVCache

Step = Callable[[], None]
# Next tokens (B,) from logits (B, vocab), uniform numbers (B,), and a mask (B, vocab) of the tokens of each row or None
Choose = Callable[[Tensor, Tensor, Tensor | None], Tensor]
WARMUP_STEPS = 2  # the first one loads kernels, the second one shows whether anything still waits for the host
# Warnings of torch's debug mode: of each wait, and once per process that the mode does not detect all of them.
WAIT, NOTICE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype feature"
MIN_REPLAYS = 8  # a capture costs about as much as three eager steps


class DrawnTokens(NamedTuple):
    """Tokens of one step, one per row."""

    rows: Sequence[int]  # row numbers
    tokens: HostCopy

    def read(self) -> dict[int, int]:
        """Token of each row, by row number. Waits for the copy."""
        return dict(zip(self.rows, self.tokens.read(), strict=True))


class DecodeLoop:
    """Generate the tokens of some rows one by one, from a cache filled by a prefill pass.

    A step only reads tensors with fixed addresses and updates them in place: the last tokens, their positions, and the
    number of tokens drawn. The host only counts.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Decoder,
        cache: KVCache,
        lengths: Sequence[int],
        choose: Choose,
        numbers: Tensor,
        seen: Tensor | None = None,
        drawn: int = 0,
    ) -> None:
        device = numbers.device
        self.model, self.cache, self.choose, self.numbers, self.seen = model, cache, choose, numbers, seen
        self.rows = list(range(len(lengths)))  # numbers of the rows in the batch
        self.lengths = list(lengths)  # initial length of each row, by number
        self.positions = torch.tensor(lengths, device=device)[:, None] - 1  # (B, 1) of the last tokens
        self.tokens = torch.zeros_like(self.positions)  # (B, 1) last tokens
        self.index = torch.full((1,), drawn, device=device)  # of the next uniform number
        self.graph = StepGraph(self.run_step, get_capture(model))
        model.begin_decoding(cache)

    def take(self, logits: Tensor) -> DrawnTokens:
        """Draw tokens from the logits (B, vocab) of the prefill pass."""
        self.draw(logits)
        return DrawnTokens(self.rows, HostCopy(self.tokens[:, 0]))

    def advance(self, num_left: int) -> DrawnTokens:
        """Add the last tokens to the cache and draw the next ones. `num_left` limits the number of further steps."""
        self.cache.cache_length += 1
        self.graph.run(self.cache.num_visible(self.tokens.device), num_left)
        return DrawnTokens(self.rows, HostCopy(self.tokens[:, 0]))

    def run_step(self) -> None:
        """Compute one token per row. Depends on no host value except `cache.num_visible`."""
        self.draw(self.model(self.tokens, self.positions, cache=self.cache)[:, -1])

    def draw(self, logits: Tensor) -> None:
        number = self.numbers.index_select(1, self.index)[:, 0]
        self.tokens.copy_(self.choose(logits, number, self.seen)[:, None])
        if self.seen is not None:
            self.seen.scatter_(1, self.tokens, True)
        self.positions += 1
        self.index += 1

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, given by number."""
        index = torch.tensor([self.rows.index(row) for row in rows], device=self.tokens.device)
        self.cache.cache_length -= max(self.lengths[row] for row in self.rows) - max(self.lengths[row] for row in rows)
        self.cache.select_rows(index)
        self.tokens, self.positions = self.tokens.index_select(0, index), self.positions.index_select(0, index)
        self.numbers = self.numbers.index_select(0, index)
        self.seen = None if self.seen is None else self.seen.index_select(0, index)
        self.rows = list(rows)
        self.graph = StepGraph(self.run_step, get_capture(self.model))


class StepGraph:
    """Runs a step: eagerly at first, then as a captured graph while its key stays the same."""

    def __init__(self, step: Step, capture: Callable[[Step], Step] | None) -> None:
        self.step, self.capture = step, capture
        self.replay: Step | None = None
        self.key, self.num_eager = -1, 0

    def run(self, key: int, num_left: int) -> None:
        """Run the step once. `key` identifies its shapes; a graph is valid for one key."""
        if key != self.key:
            self.key, self.num_eager, self.replay = key, 0, None
        if self.replay is None and self.capture is not None and self.num_eager >= WARMUP_STEPS:
            self.replay = self.capture(self.step) if num_left >= MIN_REPLAYS else None
        if self.replay is not None:
            self.replay()
            return
        self.num_eager += 1
        if self.capture is not None and self.num_eager == WARMUP_STEPS and run_detecting_waits(self.step):
            warn_eager("a layer waits for the device in each step")
            self.capture = None
        elif self.capture is None or self.num_eager != WARMUP_STEPS:
            self.step()


def get_capture(model: Decoder) -> Callable[[Step], Step] | None:
    """Function that captures steps of a model as a graph; None if they run eagerly."""
    if not capabilities(model.device).graphs:
        return None
    if isinstance(model, FSDPModule) or model.shards:
        warn_eager("weights are divided among processes")
        return None
    return capture_cuda_graph


def capture_cuda_graph(step: Step) -> Step:
    """Record the kernels of a step without running them. Returns a function that replays the graph."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate pinned memory at any time, which a global capture would forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
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
def warn_eager(reason: str) -> None:
    """Log once per reason that no graph is captured."""
    print(f"warning: generation: no CUDA graph is used: {reason}. Answers are the same, only slower.", file=sys.stderr)
