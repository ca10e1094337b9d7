"""Training that stops and resumes on other devices. Has few imports because each rank loads it."""

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

# config, layout, and the number of steps after which the run is stopped
RunSegment = tuple[str, ParallelConfig, int | None]


def step_and_stop(
    steps: int | None,
    model: Decoder,
    batches: list[Batch],
    cfg: sft.SFTConfig,
    update: TrainOptimizer,
    run: DistributedContext,
) -> Taken:
    """Train one step. After `steps` steps, send SIGTERM as a scheduler does."""
    taken = sft.forward_backward(model, batches, cfg, update, run)
    STEPS_DONE.append(1)
    if steps is not None and len(STEPS_DONE) == steps and run.is_main_process:
        signal.raise_signal(signal.SIGTERM)
    return taken


STEPS_DONE: list[int] = []


def run_segments(segments: list[RunSegment]) -> None:
    """Run the segments in order; each resumes from the last state."""
    torch.set_num_threads(1)
    for text, parallel, steps in segments:
        STEPS_DONE.clear()
        step: Callable = partial(step_and_stop, steps)
        cfg = replace(load.load_config(sft.SFTConfig, text), parallel=parallel)
        try:
            training.run(cfg, Method("sft", step, sft.evaluate), overwrite=False)
        except RunStopped:
            assert steps is not None
