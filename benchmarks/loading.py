"""Loading and saving random weights of Llama 3.2 1B in bf16, tunekit and transformers: time and memory.

    python benchmarks/loading.py [directory] [--model tunekit/llama3_2_1b] [--rounds 5] [--threads 2]

Each measurement is a process that first touches and frees as much memory as it will need: a virtual machine may
have to request it from its host, which took up to 3 s per GB. The order alternates. Files are in the page cache, so
the disk is not measured. Memory is the peak (VmHWM) minus the value before, including mapped file pages.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from mmap import PAGESIZE, mmap
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from reporting import RESULTS, describe_environment, format_range
from resource_usage import ResourceUsage
from subprocesses import run_script
from torch import nn

from tunekit import assets, build
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

SHARD_BYTES = 600 * 10**6
DTYPES = {"bf16": "frozen, in bf16 as in the files", "fp32": "fp32, for training"}
CASES = [(library, dtype) for dtype in DTYPES for library in ("tunekit", "transformers")]
SaveFunction = Callable[[Path], object]
Results = dict[tuple[str, str], list[dict[str, float]]]  # measurements of all rounds, by case


def write_random_checkpoint(directory: Path, preset: str) -> None:
    """Write random weights of a preset in several shards."""
    directory.mkdir(parents=True)
    source = HFCheckpoint.open(assets.PRESETS[preset])
    with torch.device("meta"):
        model = Decoder(source.spec)
    shapes = {n: s for n, s in model.shapes.items() if not (source.spec.tie_word_embeddings and n == TIED)}
    mappings = save_mappings(shapes, source.family.table)
    entries = {name: entry for mapping in mappings for name, entry in tensor_entries(model, mapping, source)}
    shards = plan_shards(entries, source, SHARD_BYTES)
    for file, names in shards.items():
        with SafetensorsWriter(directory / file, {name: entries[name] for name in names}) as writer:
            for name in names:
                shape, dtype = entries[name]
                is_norm = len(shape) == 1
                writer[name] = torch.ones(shape, dtype=dtype) if is_norm else (torch.randn(shape) * 0.02).to(dtype)
    copy_companion_files(source.path, directory)
    write_index(directory, shards, entries, source)


def load_tunekit(directory: Path, dtype: str) -> tuple[nn.Module, SaveFunction]:
    source, adapter = HFCheckpoint.open(directory), NoAdapter() if dtype == "fp32" else FrozenModel()
    precision = PrecisionConfig("bf16", "fp32", "checkpoint")
    options = NoQuantization(), adapter, precision, MemoryConfig(), DistributedContext(0, "cpu")
    model = build.build_model(source, *options)
    return model, lambda output: save_model(output, model, source, quiet=True)


def load_transformers(directory: Path, dtype: str) -> tuple[nn.Module, SaveFunction]:
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch_dtype)
    return model, model.save_pretrained


def count_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def touch_memory(num_bytes: int) -> None:
    """Write to each page, and free the memory."""
    with mmap(-1, num_bytes) as memory:
        for offset in range(0, len(memory), PAGESIZE):
            memory[offset] = 1


def measure_in_child(directory: Path, library: str, dtype: str, saving: bool) -> dict[str, float]:
    """Measurements of loading and, with `saving`, of saving in this process."""
    load = load_tunekit if library == "tunekit" else load_transformers
    touch_memory((3 if dtype == "fp32" else 1) * count_bytes(directory))
    with ResourceUsage() as total:
        with ResourceUsage() as loading:
            model, save = load(directory, dtype)
        for p in model.parameters():  # transformers maps files: weights are read on first use
            p.detach().sum()
    result = {"load": loading.seconds, "load cpu": loading.cpu_seconds, "peak": total.peak_bytes}
    result |= {"read": total.seconds, "read cpu": total.cpu_seconds}
    result["model"] = sum(p.nbytes for p in model.parameters())
    if saving:
        with tempfile.TemporaryDirectory(dir=directory.parent) as output, ResourceUsage() as usage:
            save(Path(output))
        result |= {"save": usage.seconds, "save peak": usage.peak_bytes}
    return result


def measure_case(library: str, dtype: str, args: argparse.Namespace) -> dict[str, float]:
    options = [str(args.directory), "--child", library, dtype, *["--no-saving"] * args.no_saving]
    env = {"OMP_NUM_THREADS": str(args.threads), "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    return run_script(__file__, *options, env=env)


def format_table(results: Results, saving: bool) -> str:
    titles = ["", "load, s", "CPU s", "load and read once, s", "CPU s", "memory"] + ["save, s", "memory"] * saving
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for (library, dtype), runs in results.items():
        cells = [format_range(run[key] for run in runs) for key in ("load", "load cpu", "read", "read cpu")]
        cells.append(f"{median(run['peak'] / run['model'] for run in runs):.2f} x")
        if saving:
            save_peak = median(run["save peak"] for run in runs) / 1e6
            cells += [format_range(run["save"] for run in runs), f"{save_peak:.0f} MB"]
        lines.append(f"| {library}, {DTYPES[dtype]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_report(args: argparse.Namespace, results: Results, load_averages: list[float]) -> str:
    return f"""# Loading and saving, {date.today().isoformat()}

{args.model}, random weights in bf16, {count_bytes(args.directory) / 1e9:.2f} GB in files of 600 MB in the page cache.
{describe_environment("tunekit", "transformers")}.
{args.threads} threads; {args.rounds} rounds in alternating order, load average {min(load_averages):.1f} to
{max(load_averages):.1f}. Median (minimum to maximum).

{format_table(results, not args.no_saving)}

"Load and read once" ends when every weight was read once: transformers maps the files, and weights in their dtype are
read on first use. Memory is VmHWM minus the memory before, relative to the size of the model for loading and reading;
mapped pages of files count.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(tempfile.gettempdir()) / "tunekit-loading")
    parser.add_argument("--model", default="tunekit/llama3_2_1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-saving", action="store_true", help="measure only loading")
    parser.add_argument("--child", nargs=2, metavar=("LIBRARY", "DTYPE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.child:
        print(json.dumps(measure_in_child(args.directory, *args.child, saving=not args.no_saving)))
        return
    is_new = not args.directory.is_dir()
    if is_new:
        write_random_checkpoint(args.directory, args.model)
    for file in args.directory.glob("*.safetensors"):  # load into the page cache
        file.read_bytes()
    results: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in CASES}
    load_averages = []
    for i in range(args.rounds):
        for case, runs in [*results.items()][:: -1 if i % 2 else 1]:
            runs.append(measure_case(*case, args))
            load_averages.append(os.getloadavg()[0])
            values = {key: round(value, 2) for key, value in runs[-1].items() if value < 1e4}
            print(*case, values, file=sys.stderr)
    text = format_report(args, results, load_averages)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{date.today().isoformat()}-loading.md").write_text(text)
    if is_new:
        shutil.rmtree(args.directory)


if __name__ == "__main__":
    main()
