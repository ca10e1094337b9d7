"""A training that is stopped and goes on with other devices. Lean: every rank imports it."""

import itertools
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tunekit.config import load
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import RunStopped
from tunekit.models.decoder import Decoder
from tunekit.recipes import sft

Stretch = tuple[str, ParallelConfig, int | None]  # the config, the layout, and after how many steps it is told to stop


def stretches(found: list[Stretch]) -> None:
    """Each in turn: a run from its last state on."""
    torch.set_num_threads(1)
    for text, parallel, num_steps in found:
        cfg = replace(load.load_config(sft.SFTConfig, text), parallel=parallel)
        sft.forward_backward = partial(stop_after, num_steps, itertools.count(1))
        try:
            sft.main(cfg)
        except RunStopped:
            assert num_steps is not None


FORWARD_BACKWARD = sft.forward_backward


def stop_after(
    num_steps: int | None,
    steps: Iterator[int],
    model: Decoder,
    batches: list[Batch],
    cfg: sft.SFTConfig,
    dist: DistributedContext,
) -> Tensor:
    """The recipe's function; in step `num_steps`, a SIGTERM to the main process, as schedulers send it."""
    if next(steps) == num_steps and dist.is_main_process:
        signal.raise_signal(signal.SIGTERM)
    return FORWARD_BACKWARD(model, batches, cfg, dist)
