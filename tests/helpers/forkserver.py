"""Child processes that are forked from a process with all imports done, and start in milliseconds."""

import functools
import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRELOADED = (
    "pytest",
    "torch._dynamo",  # torch imports this with the first optimizer
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tunekit.publishing.plots",
    "tunekit.recipes.sft",
    "tunekit.cli.commands.run_worker",
    "tunekit.cli.commands.serve",
    "tests.helpers.random_checkpoints",  # imports transformers
)


@functools.cache
def start_forkserver() -> ForkServerContext:
    """Context whose processes are forked from the one server of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", path)
        forkserver.ensure_running()
    warmup = context.Process(target=int)  # returns when everything is imported
    warmup.start()
    warmup.join()
    return context
