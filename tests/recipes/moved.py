"""A training that is stopped and goes on with other devices. Lean: every rank imports it."""

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tunekit.config import load
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import RunStopped
from tunekit.memory.config import TrainOptimizer
from tunekit.models.decoder import Decoder
from tunekit.recipes import sft
from tunekit.training import config as training
from tunekit.training.config import Method, Taken

Stretch = tuple[str, ParallelConfig, int | None]  # the config, the layout, and after how many steps it is told to stop


def stopped_after(
    steps: int | None,
    model: Decoder,
    batches: list[Batch],
    cfg: sft.SFTConfig,
    update: TrainOptimizer,
    run: DistributedContext,
) -> Taken:
    """A step, and from a certain one on the wish to stop, as a scheduler sends it."""
    taken = sft.forward_backward(model, batches, cfg, update, run)
    DONE.append(1)
    if steps is not None and len(DONE) == steps and run.is_main_process:
        signal.raise_signal(signal.SIGTERM)
    return taken


DONE: list[int] = []


def stretches(found: list[Stretch]) -> None:
    """Each in turn: a run from its last state on."""
    torch.set_num_threads(1)
    for text, parallel, steps in found:
        DONE.clear()
        step: Callable = partial(stopped_after, steps)
        cfg = replace(load.load_config(sft.SFTConfig, text), parallel=parallel)
        try:
            training.run(cfg, Method("sft", step, sft.evaluate), overwrite=False)
        except RunStopped:
            assert steps is not None
