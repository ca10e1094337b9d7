"""Loading and saving random weights of Llama 3.2 1B in bf16, tunekit and transformers: time and memory.

    python benchmarks/loading.py [folder] [--model tunekit/llama3_2_1b] [--rounds 5] [--threads 2]

Each measurement is a process that first touches and frees as much memory as it will need: a virtual machine may
have to request it from its host, which took up to 3 s per GB. The order alternates. Files are in the page cache, so
the disk is not measured. Memory is the peak (VmHWM) minus the value before, including mapped file pages.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tunekit import __version__, assets, build, env_info
from tunekit.adapters.config import FrozenModel, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.safetensors_io import SafetensorsWriter
from tunekit.checkpoint.save_model import copy_companion_files, plan_shards, save_model, tensor_entries, write_index
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_map import save_mappings
from tunekit.quantization.config import NoQuantization

RESULTS = Path(__file__).parent / "results"
CASES = {
    "bf16, as it is in the files": ("ours", "theirs"),
    "fp32, for training": ("ours-fp32", "theirs-fp32"),
}


def make(folder: Path, name: str) -> None:
    """Random weights of a preset, in files of 600 MB."""
    folder.mkdir(parents=True)
    source = HFCheckpoint.open(assets.PRESETS[name])
    with torch.device("meta"):
        model = Decoder(source.spec)
    shapes = {n: s for n, s in model.shapes.items() if not (source.spec.tie_word_embeddings and n == TIED)}
    entries = {
        n: e for move in save_mappings(shapes, source.family.table) for n, e in tensor_entries(model, move, source)
    }
    shards = plan_shards(entries, source, 600 * 10**6)
    for file, names in shards.items():
        with SafetensorsWriter(folder / file, {n: entries[n] for n in names}) as out:
            for n in names:
                shape, dtype = entries[n]
                out[n] = torch.randn(shape).mul_(0.02).to(dtype) if len(shape) > 1 else torch.ones(shape, dtype=dtype)
    copy_companion_files(source.path, folder)
    write_index(folder, shards, entries, source)


def ours(folder: Path, kind: str) -> tuple[nn.Module, Callable[[Path], object]]:
    trained = kind.endswith("fp32")
    source, precision = HFCheckpoint.open(folder), PrecisionConfig("bf16", "fp32", "checkpoint")
    choices = (
        NoQuantization(),
        NoAdapter() if trained else FrozenModel(),
        precision,
        MemoryConfig(),
        DistributedContext(0, "cpu"),
    )
    model = build.build_model(source, *choices)
    return model, lambda out: save_model(out, model, source, quiet=True)


def theirs(folder: Path, kind: str) -> tuple[nn.Module, Callable[[Path], object]]:
    dtype = torch.float32 if kind.endswith("fp32") else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, model.save_pretrained


def read_status(key: str) -> int:
    """Value of a field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Measurement:
    """Wall time, CPU time, and memory of a with block."""

    def __enter__(self) -> "Measurement":
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        self.before, self.wall, self.cpu = read_status("VmRSS"), time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.peak, self.anonymous = read_status("VmHWM") - self.before, read_status("RssAnon")


def child(folder: Path, kind: str, saving: bool) -> None:
    """One measurement, printed as JSON."""
    load = ours if kind.startswith("ours") else theirs
    result: dict[str, Any] = {}
    times = 3 if kind.endswith("fp32") else 1
    with mmap(-1, times * sum(file.stat().st_size for file in folder.glob("*.safetensors"))) as memory:
        for at in range(0, len(memory), PAGESIZE):
            memory[at] = 1
    with Measurement() as used:
        model, save = load(folder, kind)
        result |= {"load": time.perf_counter() - used.wall, "load cpu": time.process_time() - used.cpu}
        for p in model.parameters():  # transformers maps files: weights are read on first use
            p.detach().sum()
    result |= {"used": used.wall, "used cpu": used.cpu, "peak": used.peak, "anonymous": used.anonymous}
    result["model"] = sum(p.nbytes for p in model.parameters())
    if saving:
        with tempfile.TemporaryDirectory(dir=folder.parent) as out, Measurement() as used:
            save(Path(out))
        result |= {"save": used.wall, "save cpu": used.cpu, "save peak": used.peak}
    print(json.dumps(result))


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
    words = [sys.executable, __file__, str(args.folder), "--child", kind, *["--no-saving"] * args.no_saving]
    env = os.environ | {
        "OMP_NUM_THREADS": str(args.threads),
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: Iterable[float]) -> str:
    values = sorted(values)
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def table(results: dict[str, list[dict[str, float]]], saving: bool) -> str:
    titles = ["", "seconds", "of the processor", "and used once", "of the processor", "memory"]
    titles += ["saving, s", "memory"] * saving
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for case, kinds in CASES.items():
        for kind in kinds:
            runs = results[kind]
            columns = [spread(run[key] for run in runs) for key in ("load", "load cpu", "used", "used cpu")]
            columns += [f"{statistics.median(run['peak'] / run['model'] for run in runs):.2f} x"]
            if saving:
                columns += [spread(run["save"] for run in runs)]
                columns += [f"{statistics.median(run['save peak'] for run in runs) / 1e6:.0f} MB"]
            library = "tunekit" if kind.startswith("ours") else "transformers"
            lines.append(f"| {library}, {case} | {' | '.join(columns)} |")
    return "\n".join(lines)


def report(args: argparse.Namespace, size: int, results: dict[str, list[dict[str, float]]], loads: list[float]) -> str:
    cpu = env_info.processor()
    versions = f"tunekit {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"""# Loading and saving, {date.today().isoformat()}

{args.model}, random weights in bf16, {size / 1e9:.2f} GB in files of 600 MB that are in the page cache.
{versions}, Python {platform.python_version()}, Linux {platform.release()}.
{cpu}, {os.cpu_count()} cores, {args.threads} threads; {args.rounds} rounds in turns, load average {min(loads):.1f} to
{max(loads):.1f}. Medians, and least and most.

{table(results, not args.no_saving)}

"used once" ends when every weight was read once: transformers maps the files, and weights in their dtype are read only
when they are used. Memory is VmHWM above what the process had before, for loading and using in sizes of the model; a
mapped page of a file counts.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(tempfile.gettempdir()) / "tunekit-loading")
    parser.add_argument("--model", default="tunekit/llama3_2_1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-saving", action="store_true")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child(args.folder, args.child, not args.no_saving)
        return
    is_new = not args.folder.is_dir()
    if is_new:
        make(args.folder, args.model)
    results: dict[str, list[dict[str, float]]] = {kind: [] for kinds in CASES.values() for kind in kinds}
    loads = []
    for file in args.folder.glob("*.safetensors"):  # load into the page cache
        file.read_bytes()
    for number in range(args.rounds):
        for kind, runs in [*results.items()][:: -1 if number % 2 else 1]:
            result = measure(kind, args)
            loads.append(os.getloadavg()[0])
            print(kind, {key: round(value, 2) for key, value in result.items() if value < 1e4}, file=sys.stderr)
            runs.append(result)
    text = report(args, sum(file.stat().st_size for file in args.folder.glob("*.safetensors")), results, loads)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{date.today().isoformat()}-loading.md").write_text(text)
    if is_new:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
