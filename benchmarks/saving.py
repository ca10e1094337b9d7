"""Saving a sharded model: time compared with that of the disk, pauses of training, and memory.

    python -m benchmarks.saving [directory] [--model tunekit/llama3_2_1b] [--ranks 4] [--rounds 3] [--master-dtype bf16]

All weights of a random model are trained by AdamW with FSDP on the CPU. Each round first writes and syncs the same
number of bytes as a training state from one process, like dd, then saves the state synchronously, then in the
background, then the checkpoint. The order of disk and states alternates. Memory is the peak of a process (VmHWM)
minus the value before.
"""

import argparse
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.reporting import RESULTS, describe_environment, format_range
from benchmarks.resource_usage import measure_usage, read_memory
from tests.helpers.ranks import run_ranks
from tunekit import assets, build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NoQuantization

CHUNK_BYTES = 2**24
TIMEOUT = 3600.0  # seconds for all rounds
OPERATIONS = {
    "disk": "disk write of the same bytes by one process",
    "sync": "training state, synchronous",
    "pause": "training state in the background: pause of training",
    "background": "training state in the background: until it is complete",
    "final": "final checkpoint",
}
WITH_BANDWIDTH = ("disk", "sync", "background")
Round = dict[str, tuple[float, int]]  # seconds and peak bytes by operation


@dataclass
class RankResult:
    """Measurements of one rank."""

    state_bytes: int  # of all ranks
    initial_bytes: int  # memory of this rank before saving
    rounds: list[Round]


def measure(fn: Callable[[], object]) -> tuple[float, int]:
    """Seconds and peak bytes of a call."""
    usage = measure_usage(fn)
    return usage.seconds, usage.peak_bytes


def count_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def constant_lr(step: int) -> float:
    return 1.0


def write_to_disk(directory: Path, num_bytes: int) -> None:
    """Write and sync random bytes from one process."""
    chunk = os.urandom(CHUNK_BYTES)
    with (directory / "bytes").open("wb", buffering=0) as stream:
        for offset in range(0, num_bytes, CHUNK_BYTES):
            stream.write(chunk[: num_bytes - offset])
        os.fsync(stream.fileno())


def measure_rank(preset: str, directory: Path, rounds: int, master_dtype: Literal["bf16", "fp32"]) -> RankResult:
    """Run all rounds on this rank."""
    with DistributedContext(0, "cpu") as dist:
        source, precision = HFCheckpoint.open(assets.PRESETS[preset]), PrecisionConfig("fp32", master_dtype)
        options = NoQuantization(), NoAdapter(), precision, MemoryConfig(), dist
        model = build.build_model(source, *options, from_scratch=True)
        optimizer = AdamWConfig().build(NoAdapter().param_groups(model))
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        scheduler = LambdaLR(optimizer, constant_lr)
        sync, background = (
            Checkpointer(directory / name, model, optimizer, scheduler, 1, dist, background=name == "background")
            for name in ("sync", "background")
        )
        sync.save(1)
        background.save(1)  # allocates buffers
        background.wait()
        result = RankResult(count_bytes(directory / "sync"), read_memory("VmRSS"), [])
        for i in range(rounds):
            result.rounds.append(measure_round(directory, i, result.state_bytes, (sync, background), dist))
        for measurements in result.rounds:
            measurements |= measure_final_checkpoint(model, source, directory, dist)
        return result


def measure_round(
    directory: Path,
    index: int,
    num_bytes: int,
    checkpointers: tuple[Checkpointer, Checkpointer],
    dist: DistributedContext,
) -> Round:
    """Measure the disk and both kinds of saving, in alternating order."""
    sync, background = checkpointers

    def measure_disk() -> Round:
        dist.barrier()
        usage = measure(lambda: write_to_disk(directory, num_bytes)) if dist.is_main_process else (0.0, 0)
        dist.barrier()
        return {"disk": usage}

    def measure_states() -> Round:
        dist.barrier()
        sync_usage = measure(lambda: sync.save(index + 2))
        dist.barrier()
        start = time.perf_counter()
        pause = measure(lambda: background.save(index + 2))
        background.wait()
        return {"sync": sync_usage, "pause": pause, "background": (time.perf_counter() - start, 0)}

    return measure_disk() | measure_states() if index % 2 else measure_states() | measure_disk()


def measure_final_checkpoint(
    model: torch.nn.Module, source: HFCheckpoint, directory: Path, dist: DistributedContext
) -> Round:
    def save() -> None:
        with atomic.AtomicDir(directory / "final", dist) as final:
            final_checkpoint.save_final(NoAdapter(), final, model, source, dist)  # type: ignore[arg-type]

    dist.barrier()
    return {"final": measure(save)}


def format_report(args: argparse.Namespace, ranks: list[RankResult]) -> str:
    state_bytes, initial_bytes = ranks[0].state_bytes, max(rank.initial_bytes for rank in ranks)
    lines = ["| | seconds | GB/s | memory of a process, MB |", "| --- " * 4 + "|"]
    for operation, label in OPERATIONS.items():
        rounds = [[rank.rounds[i][operation] for rank in ranks] for i in range(args.rounds)]
        seconds = [max(rank_seconds for rank_seconds, _ in usages) for usages in rounds]
        peak = max(peak_bytes for usages in rounds for _, peak_bytes in usages)
        bandwidth = f"{state_bytes / 1e9 / statistics.median(seconds):.2f}" if operation in WITH_BANDWIDTH else ""
        lines.append(f"| {label} | {format_range(seconds)} | {bandwidth} | {peak / 1e6:.0f} |")
    return f"""# Saving from {args.ranks} processes, {date.today().isoformat()}

{args.model}, random weights in {args.master_dtype} with AdamW, FSDP over {args.ranks} processes.
A training state has {state_bytes / 1e9:.2f} GB.
{describe_environment("tunekit")}.
{args.rounds} rounds: median (minimum to maximum), of the slowest process; memory of the largest process.
A process had {initial_bytes / 1e9:.2f} GB before.

{chr(10).join(lines)}

The buffer for saving in the background is allocated once, is as large as the shard of a process
({state_bytes / args.ranks / 1e9:.2f} GB), and is part of the memory before.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(tempfile.gettempdir()) / "tunekit-saving")
    parser.add_argument("--model", default="tunekit/llama3_2_1b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--no-results", action="store_true", help="print the report without writing it")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    function = importlib.import_module("benchmarks.saving").measure_rank  # that ranks can import
    ranks = run_ranks(args.ranks, function, args.model, args.directory, args.rounds, args.master_dtype, limit=TIMEOUT)
    text = format_report(args, ranks)
    print(text, file=sys.stdout)
    if not args.no_results:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{date.today().isoformat()}-saving.md").write_text(text)
    shutil.rmtree(args.directory)


if __name__ == "__main__":
    main()
