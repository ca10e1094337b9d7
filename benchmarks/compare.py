"""Compare tunekit with transformers + peft + trl (+ bitsandbytes) and torchtune: speed, memory, losses, and a plot.

    python benchmarks/compare.py lora qlora full --trl PYTHON --torchtune PYTHON --max-length 512 --rounds 3

Each library runs as a process in its own environment (see benchmarks/README.md), with the same checkpoint, the same
packed rows in the same order and, with LoRA, the same initial adapter. tunekit runs `tune run sft`, torchtune its own
recipe, and trl its SFTTrainer. Runs of the libraries alternate. The report is rewritten after each run.
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from pathlib import Path

from library_runs import (
    LibraryResult,
    RunSetup,
    add_arguments,
    build_tunekit_config,
    format_step_times,
    format_versions,
    run_library,
    run_process,
    run_tunekit,
)
from plots import plot_bars
from reporting import BENCHMARKS, CPU
from training_inputs import LlamaShape, SFTTask, write_checkpoint, write_json, write_sft_data

from tunekit.env_info import describe_hardware

METHODS = ("lora", "qlora", "full")
HEADER = """
| | step time, s | target tokens/s | speed of tunekit | peak GiB, training (process) | memory of tunekit | first loss \
| loss at step {} | fraction of matmul limit |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass
class Comparison:
    """Results of all libraries by task, and hardware limits."""

    file: Path  # without suffix
    shape: LlamaShape
    results: dict[SFTTask, list[LibraryResult]]
    limits: dict[str, float] = field(default_factory=dict)


def build_sft_config(setup: RunSetup, task: SFTTask, directory: Path) -> dict:
    """Config of tunekit's recipe sft."""
    source = str(directory / "texts.jsonl")
    data = {"kind": "text", "source": source, "max_length": task.max_length, "packing": True, "shuffle": False}
    lora = {"kind": "lora", "rank": task.rank, "alpha": task.alpha, "adapter_path": str(setup.directory / "adapter")}
    adapter = "none" if task.method == "full" else lora
    return build_tunekit_config(setup, task, recipe="sft", data=data, adapter=adapter)


def run_tunekit_sft(
    setup: RunSetup, task: SFTTask, directory: Path, overrides: tuple[str, ...] = ()
) -> tuple[dict, int]:
    """Run `tune run sft` with `overrides`."""
    return run_tunekit(setup, build_sft_config(setup, task, directory), directory, overrides)


def add_library_run(setup: RunSetup, task: SFTTask, result: LibraryResult, warmup_steps: int) -> None:
    """Run one library, and add its measurements or its error to `result`."""
    start, directory = time.perf_counter(), setup.directory / task.method
    try:
        if result.name == "tunekit":
            measurements, process_bytes = run_tunekit_sft(setup, task, directory)
        else:
            measurements, process_bytes = run_library(setup, result.name, "sft", directory)
        result.add_run(measurements, process_bytes, warmup_steps)
        message = f"{result.step_time:.2f} s per step"
    except (RuntimeError, OSError) as error:
        result.error = message = str(error)
    seconds = time.perf_counter() - start
    print(f"{task.method} {task.max_length} {result.name}: {message} ({seconds:.0f} s in total)", flush=True)


def format_title(task: SFTTask) -> str:
    return f"{task.method}, {task.batch_size} packed rows of {task.max_length:,}"


def format_table(task: SFTTask, comparison: Comparison) -> str:
    """A row per library, then the times of all steps."""
    all_results = comparison.results[task]
    results = [result for result in all_results if result.seconds]
    baseline = next((result for result in results if result.name == "tunekit"), None)
    last_step = min((len(result.losses) for result in results), default=0)  # that all libraries have reached
    text = f"\n## {format_title(task)}\n{HEADER.format(last_step)}"
    for result in results:
        speedup = result.step_time / baseline.step_time if baseline else float("nan")
        memory_ratio = baseline.peak_gib / result.peak_gib if baseline else float("nan")
        flop_rate = task.count_flops(comparison.shape) / result.step_time
        text += f"| {result.name} | {result.step_time:.2f} | {task.num_target_tokens / result.step_time:.0f} "
        text += f"| {speedup:.2f} x | {result.peak_gib:.2f} ({result.process_peak_gib:.2f}) | {memory_ratio:.2f} x "
        text += f"| {result.losses[0]:.5f} | {result.losses[last_step - 1]:.5f} "
        text += f"| {flop_rate / comparison.limits['matmul']:.0%} |\n"
    return text + format_step_times(all_results)


def format_report(comparison: Comparison) -> str:
    results = [*chain.from_iterable(comparison.results.values())]
    threads = sorted({result.threads for result in results if result.threads})
    shape, limits = comparison.shape, comparison.limits
    text = f"# Libraries compared on the CPU, {date.today()}\n\n"
    text += f"`python benchmarks/compare.py {' '.join(sys.argv[1:])}`\n\n{describe_hardware(CPU)}; "
    text += f"Python {platform.python_version()}, {format_versions(results)}; "
    text += f"threads: {', '.join(map(str, threads))}.\n"
    text += f"A Llama with {shape.layers} layers, dim {shape.dim}, {shape.heads}/{shape.kv_heads} heads, intermediate "
    text += f"size {shape.intermediate_size}, vocabulary {shape.vocab:,}, tied embeddings. Medians of all measured "
    text += f"steps.\n\nLimits measured in this run: copies {limits['copy'] / 1e9:.1f} GB/s (read and written), bf16 "
    text += f"matmuls {limits['matmul'] / 1e9:.0f} GFLOP/s (size {limits['matmul_size']:,}).\n"
    return text + "".join(format_table(task, comparison) for task in comparison.results)


def load_earlier_results(comparison: Comparison) -> None:
    """Load results and limits of earlier calls. Libraries that failed run again."""
    file = comparison.file.with_suffix(".json")
    if not file.is_file():
        return
    earlier = json.loads(file.read_text())
    comparison.limits = earlier["limits"]
    for task, results in comparison.results.items():
        entries = earlier["tasks"].get(format_title(task), [])
        loaded = {entry["name"]: LibraryResult(**entry | {"error": ""}) for entry in entries}
        comparison.results[task] = [loaded.get(result.name, result) for result in results]


def update_limits(setup: RunSetup, limits: dict[str, float]) -> dict[str, float]:
    """Maximum of `limits` and of limits that are measured now: other processes may slow down the machine."""
    output, script = setup.directory / "limits.json", BENCHMARKS / "hardware_limits.py"
    command = f"{shlex.join([sys.executable, str(script)])} > {shlex.quote(str(output))}"
    run_process(setup, ["bash", "-c", command])
    measured = json.loads(output.read_text())
    if limits.get("matmul", 0) > measured["matmul"]:
        measured |= {name: limits[name] for name in ("matmul", "matmul_size")}
    return measured | {"copy": max(measured["copy"], limits.get("copy", 0))}


def run_rounds(setup: RunSetup, comparison: Comparison, rounds: int, warmup_steps: int) -> None:
    for task in comparison.results:
        write_sft_data(setup.directory / task.method, comparison.shape, task)
    for _ in range(rounds):
        comparison.limits = update_limits(setup, comparison.limits)
        for task, results in comparison.results.items():
            for result in results:
                add_library_run(setup, task, result, warmup_steps)
                write_report(comparison)
    write_report(comparison)


def write_report(comparison: Comparison) -> None:
    """Write the report, its data and its plot."""
    comparison.file.with_suffix(".md").write_text(format_report(comparison))
    tasks = {format_title(task): [vars(result) for result in rs] for task, rs in comparison.results.items()}
    write_json(comparison.file.with_suffix(".json"), {"limits": comparison.limits, "tasks": tasks})
    speed: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, float]] = {}
    for task, all_results in comparison.results.items():
        results = [result for result in all_results if result.seconds]
        speed[format_title(task)] = {r.name: task.num_target_tokens / r.step_time for r in results}
        memory[format_title(task)] = {r.name: r.peak_gib for r in results}
    panels = {"target tokens per second": speed, "peak resident memory, GiB": memory}
    plot_bars(comparison.file.with_suffix(".png"), panels)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help=", ".join(METHODS))
    for name in ("trl", "torchtune"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter of the environment with {name}")
    parser.add_argument("--wrapped", action="store_true", help="also run trl without document boundaries")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser, steps=6)
    parser.add_argument("--append", action="store_true", help="add rounds to the results of the same day and name")
    parser.add_argument("--name", default="cpu", help="suffix of the names of the written files")
    args = parser.parse_args()
    if invalid := set(args.methods) - set(METHODS):
        parser.error(f"methods: must be of {', '.join(METHODS)}, got {', '.join(invalid)}")
    return args


def main() -> None:
    args = parse_arguments()
    pythons = {name: python for name in ("trl", "torchtune") if (python := vars(args)[name])}
    names = ["tunekit", *pythons, *(["trl, wrapped"] if args.wrapped and "trl" in pythons else [])]
    shape = replace(LlamaShape(), layers=args.layers)
    base = SFTTask(max_length=args.max_length, batch_size=args.batch_size, steps=args.steps)
    results = {replace(base, method=method): [LibraryResult(name) for name in names] for method in args.methods}
    comparison = Comparison(args.results / f"{date.today()}-compare-{args.name}", shape, results)
    if args.append:
        load_earlier_results(comparison)
    with tempfile.TemporaryDirectory() as directory:
        setup = RunSetup.from_args(args, directory, **pythons)
        write_checkpoint(setup.directory, shape, base)
        run_rounds(setup, comparison, args.rounds, args.warmup_steps)


if __name__ == "__main__":
    main()
