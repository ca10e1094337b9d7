"""Run a function on several ranks: `run_ranks(2, function, *args)` returns the result of each rank.

Each rank is a process with the environment of torchrun, so that `DistributedContext()` joins the others. It is forked
from a process that has imported torch and tunekit.
"""

import gc
import importlib
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.helpers import plain_plots
from tests.helpers.forkserver import ROOT, start_forkserver
from tests.helpers.wait import TIMEOUT_SECONDS

GRACE_SECONDS = 3.0  # time for other ranks to report their errors after one has failed


def run_ranks(
    count: int, function: Callable[..., Any], *args: object, group: bool = False, limit: float = TIMEOUT_SECONDS
) -> list[Any]:
    """Results of `function(*args)` on each of `count` ranks, in rank order. AssertionError with the output of
    failed ranks.

    The function must be at module level, and its arguments and results picklable. `group`: create a gloo process
    group; leave it out if the function creates a DistributedContext.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit))
    with TemporaryDirectory() as name:
        folder = Path(name)
        call = function.__module__, function.__qualname__, args, group
        (folder / "work").write_bytes(pickle.dumps(call))
        ranks = [start_worker(rank, count, store.port, folder) for rank in range(count)]
        try:
            wait_for_workers(ranks, folder, time.monotonic() + limit)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(count)]


def worker_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Environment of a torchrun worker. The parent owns the store, so the port cannot be taken by another process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TUNEKIT_RANK")}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    variables = {name: str(number) for name, number in numbers.items()}
    agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return inherited | variables | agent | {"PYTHONPATH": path}


def start_worker(rank: int, count: int, port: int, folder: Path) -> ForkServerProcess:
    environment = worker_environment(rank, count, port)
    args = (environment, Path.cwd(), folder, folder / f"log{rank}")
    process = start_forkserver().Process(target=run_rank, args=args)
    process.start()
    return process


def wait_for_workers(ranks: list[ForkServerProcess], folder: Path, timeout_time: float) -> None:
    """Wait until all workers succeed. Otherwise raise AssertionError with the output of those that failed."""
    while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
        assert time.monotonic() < timeout_time, failure_report(ranks, folder, "took too long")
        time.sleep(0.01)
    if any(rank.exitcode for rank in ranks):
        deadline = time.monotonic() + GRACE_SECONDS
        while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise AssertionError(failure_report(ranks, folder, "failed"))


def failure_report(ranks: list[ForkServerProcess], folder: Path, problem: str) -> str:
    """Output of the workers that did not succeed, by rank."""
    texts = []
    for rank_number, rank in enumerate(ranks):
        if rank.exitcode != 0:
            status = "still running" if rank.exitcode is None else f"exit code {rank.exitcode}"
            texts.append(
                f"--- rank {rank_number} ({status})\n{(folder / f'log{rank_number}').read_text(errors='replace')}"
            )
    return "\n".join([f"ranks {problem}", *texts])


def call_function(folder: Path) -> None:
    """Call the function and write its result to a file."""
    module, name, args, group = pickle.loads((folder / "work").read_bytes())
    if group:
        dist.init_process_group("gloo")
    function: Any = importlib.import_module(module)
    for attribute in name.split("."):
        function = vars(function)[attribute]
    result = function(*args)
    partial = folder / f"partial{os.environ['RANK']}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result{os.environ['RANK']}")
    if dist.is_initialized():
        dist.destroy_process_group()


def run_rank(environment: dict[str, str], directory: Path, folder: Path, log: Path) -> None:
    """Entry point of a rank. It does not wait for others: a broken process group may never end."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()  # those of the server
    os.environ.update(environment)
    os.chdir(directory)
    gc.freeze()  # all that is imported already
    np.random.seed()  # each rank of a real run has its own state
    plain_plots.replace_plots()
    code = 0
    try:
        call_function(folder)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
