"""Training that stops and resumes on other devices. Has few imports because each rank loads it."""

import itertools
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tunekit.config import load
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import RunStopped
from tunekit.models.decoder import Decoder
from tunekit.recipes import sft

# config, layout, and the number of steps after which the run is stopped
RunSegment = tuple[str, ParallelConfig, int | None]
FORWARD_BACKWARD = sft.forward_backward


def run_segments(segments: list[RunSegment]) -> None:
    """Run the segments in order; each resumes from the last state."""
    torch.set_num_threads(1)
    for text, parallel, num_steps in segments:
        cfg = replace(load.load_config(sft.SFTConfig, text), parallel=parallel)
        sft.forward_backward = partial(forward_backward_and_stop, num_steps, itertools.count(1))
        try:
            sft.main(cfg)
        except RunStopped:
            assert num_steps is not None
        finally:
            sft.forward_backward = FORWARD_BACKWARD


def forward_backward_and_stop(
    num_steps: int | None,
    steps: Iterator[int],
    model: Decoder,
    batches: list[Batch],
    cfg: sft.SFTConfig,
    dist: DistributedContext,
    *args: Any,
) -> Tensor:
    """Gradients of one step. In step `num_steps`, send SIGTERM as a scheduler does."""
    loss = FORWARD_BACKWARD(model, batches, cfg, dist, *args)
    if next(steps) == num_steps and dist.is_main_process:
        signal.raise_signal(signal.SIGTERM)
    return loss
