"""Several ranks for a test: `on(2, function, *args)` calls a function in each of them, and returns the results.

Each rank is a process of its own with the environment that torchrun gives, so `Run()` in there is one of several. A
start costs as long as importing torch takes: put all that two ranks can tell into one function.
"""

import importlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from tests.waiting import TIMEOUT_SECONDS

ROOT = Path(__file__).parent.parent.parent
GRACE = 3.0  # seconds that the others have to tell of their own troubles, once one has failed


def on(
    count: int, function: Callable[..., Any], *args: object, group: bool = False, limit: float = TIMEOUT_SECONDS
) -> list[Any]:
    """What `function(*args)` returned on each of `count` ranks, in their order; AssertionError with the first failure.

    The function stands at the top of its module, and what goes in and out can be pickled. With `group` gloo's process
    group is there already; leave it out where `Run` makes it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit))
    with TemporaryDirectory() as name:
        folder = Path(name)
        work = function.__module__, function.__qualname__, args, group
        (folder / "work").write_bytes(pickle.dumps(work))
        ranks = [start(rank, count, store.port, folder) for rank in range(count)]
        try:
            wait(ranks, folder, time.monotonic() + limit)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(count)]


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank. The store is kept by the process that starts them, so no port can be taken twice."""
    kept = {name: word for name, word in os.environ.items() if not name.startswith("TUNEKIT_RANK")}
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    told = {name: str(place) for name, place in places.items()}
    agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | told | agent | {"PYTHONPATH": path}


def start(rank: int, count: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"log{rank}").open("wb") as log:
        words = [sys.executable, "-m", "tests.parallel.ranks", str(folder)]
        env = environment(rank, count, port)
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)


def wait(ranks: list[subprocess.Popen[bytes]], folder: Path, end: float) -> None:
    """Until all have ended well; else tell what each that did not has printed."""
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        assert time.monotonic() < end, told(ranks, folder, "took too long")
        time.sleep(0.01)
    if any(rank.poll() for rank in ranks):
        late = time.monotonic() + GRACE
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < late:
            time.sleep(0.01)
        raise AssertionError(told(ranks, folder, "failed"))


def told(ranks: list[subprocess.Popen[bytes]], folder: Path, how: str) -> str:
    """What the ranks that did not end well have printed, under their numbers."""
    texts = []
    for place, rank in enumerate(ranks):
        if rank.poll() != 0:
            ended = "still at it" if rank.returncode is None else f"exit code {rank.returncode}"
            texts.append(f"--- rank {place} ({ended})\n{(folder / f'log{place}').read_text(errors='replace')}")
    return "\n".join([f"ranks {how}", *texts])


def main(folder: Path) -> None:
    """In a rank: do the work, leave the result in a file."""
    module, name, args, group = pickle.loads((folder / "work").read_bytes())
    if group:
        dist.init_process_group("gloo")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = vars(function)[part]
    result = function(*args)
    partial = folder / f"partial{os.environ['RANK']}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result{os.environ['RANK']}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: a group that has broken may wait for the others
