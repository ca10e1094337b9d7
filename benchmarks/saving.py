"""Saving a sharded model: time compared with that of the disk, pauses of training, and memory.

    python -m benchmarks.saving [folder] [--model tunekit/llama3_2_1b] [--ranks 4] [--rounds 3] [--trained bf16]

All weights of a random model are trained by AdamW with FSDP on the CPU. Each round first writes and syncs the same
number of bytes as a training state from one process, like dd, then saves the state synchronously, then in the
background, then the checkpoint. The order of disk and states alternates. Memory is the peak of a process (VmHWM)
minus the value before.
"""

import argparse
import importlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.helpers.ranks import run_ranks
from tunekit import __version__, assets, build, env_info
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NoQuantization

RESULTS = Path(__file__).parent / "results"
CHUNK = 2**24
LIMIT = 3600.0  # seconds for all rounds
KINDS = {
    "disk": "the disk alone: the same bytes, one process",
    "waiting": "a state, while training waits",
    "pause": "a state in the background: training pauses",
    "background": "a state in the background: until it is marked",
    "final": "files for others",
}
Round = dict[str, tuple[float, int]]  # seconds and bytes of memory


def read_status(key: str) -> int:
    """Value of a field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure(fn: Callable[[], object]) -> tuple[float, int]:
    """Seconds and memory of a call."""
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before, start = read_status("VmRSS"), time.perf_counter()
    fn()
    return time.perf_counter() - start, read_status("VmHWM") - before


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def constant(step: int) -> float:
    return 1.0


def write_to_disk(folder: Path, count: int) -> None:
    """Write `count` bytes to the disk from one process."""
    chunk = os.urandom(CHUNK)
    with (folder / "bytes").open("wb", buffering=0) as stream:
        for at in range(0, count, CHUNK):
            stream.write(chunk[: count - at])
        os.fsync(stream.fileno())


def run_rounds(name: str, out: Path, rounds: int, trained: Literal["bf16", "fp32"]) -> tuple[int, int, list[Round]]:
    """Bytes of a state, memory of this rank before saving, and all rounds."""
    with DistributedContext(0, "cpu") as dist:
        source = HFCheckpoint.open(assets.PRESETS[name])
        model = build.build_model(
            source,
            NoQuantization(),
            NoAdapter(),
            PrecisionConfig("fp32", trained),
            MemoryConfig(),
            dist,
            from_scratch=True,
        )
        optimizer = AdamWConfig().build(NoAdapter().param_groups(model))
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        schedule = LambdaLR(optimizer, constant)
        states = [
            Checkpointer(out / n, model, optimizer, schedule, 1, dist, background=n == "back") for n in ("wait", "back")
        ]
        states[0].save(1)
        states[1].save(1)  # allocates buffers
        states[1].wait()
        total, rss_before = size(out / "wait"), read_status("VmRSS")
        rounds_done = [one_round(out, index, total, states, dist) for index in range(rounds)]
        rounds_done = [round_done | save_final_checkpoint(model, source, out, dist) for round_done in rounds_done]
        return total, rss_before, rounds_done


def one_round(out: Path, index: int, total: int, states: list[Checkpointer], dist: DistributedContext) -> Round:
    """Measure the disk and both kinds of saving, in alternating order."""

    def disk_only() -> Round:
        dist.barrier()
        spent = measure(lambda: write_to_disk(out, total)) if dist.is_main_process else (0.0, 0)
        dist.barrier()
        return {"disk": spent}

    def save_states() -> Round:
        dist.barrier()
        waiting = measure(lambda: states[0].save(index + 2))
        dist.barrier()
        start = time.perf_counter()
        pause = measure(lambda: states[1].save(index + 2))
        states[1].wait()
        return {"waiting": waiting, "pause": pause, "background": (time.perf_counter() - start, 0)}

    return disk_only() | save_states() if index % 2 else save_states() | disk_only()


def save_final_checkpoint(model: torch.nn.Module, source: HFCheckpoint, out: Path, dist: DistributedContext) -> Round:
    def save() -> None:
        with atomic.AtomicDir(out / "final", dist) as folder:
            final_checkpoint.save_final(NoAdapter(), folder, model, source, dist)  # type: ignore[arg-type]

    dist.barrier()
    return {"final": measure(save)}


def spread(values: list[float]) -> str:
    values = sorted(values)
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def report(args: argparse.Namespace, ranks: list[tuple[int, int, list[Round]]], load: float) -> str:
    cpu = env_info.processor()
    total, rss_before = ranks[0][0], max(rank[1] for rank in ranks)
    lines = ["| | seconds | GB/s | memory of a process, MB |", "| --- " * 4 + "|"]
    for kind, label in KINDS.items():
        rounds = range(args.rounds)
        seconds = [max(rank[2][index][kind][0] for rank in ranks) for index in rounds]
        memory = max(rank[2][index][kind][1] for rank in ranks for index in rounds)
        speed = f"{total / 1e9 / statistics.median(seconds):.2f}" if kind in ("disk", "waiting", "background") else ""
        lines.append(f"| {label} | {spread(seconds)} | {speed} | {memory / 1e6:.0f} |")
    return f"""# Saving from {args.ranks} processes, {date.today().isoformat()}

{args.model}, random weights in {args.trained} with AdamW, FSDP over {args.ranks} processes.
A state has {total / 1e9:.2f} GB.
tunekit {__version__}, torch {torch.__version__}, Python {platform.python_version()}, Linux {platform.release()}.
{cpu}, {os.cpu_count()} cores; {args.rounds} rounds, load average {load:.1f} at the end.
Medians, and least and most; of processes, the slowest and the largest. A process had {rss_before / 1e9:.2f} GB before.

{chr(10).join(lines)}

The copy from which a state is written in the background is made once, as large as a process's share of the state
({total / args.ranks / 1e9:.2f} GB), and is part of what it had before.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(tempfile.gettempdir()) / "tunekit-saving")
    parser.add_argument("--model", default="tunekit/llama3_2_1b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trained", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--no-results", action="store_true", help="print, and leave nothing")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    work = importlib.import_module("benchmarks.saving").measured  # importable by all ranks
    ranks = run_ranks(args.ranks, work, args.model, args.folder, args.rounds, args.trained, limit=LIMIT)
    text = report(args, ranks, os.getloadavg()[0])
    print(text, file=sys.stdout)
    if not args.no_results:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{date.today().isoformat()}-saving.md").write_text(text)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
