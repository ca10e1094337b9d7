"""Compare tunekit with transformers + peft + trl (+ bitsandbytes) and torchtune: speed, memory, losses, and a plot.

    python benchmarks/compare.py lora qlora full --trl PYTHON --torchtune PYTHON --length 512 --rounds 3

Each contestant runs as a process in its own environment (see benchmarks/README.md), with the same checkpoint, the
same packed rows in the same order and, with LoRA, the same initial adapter. tunekit runs `tune run sft`, torchtune
its own recipe, and trl its SFTTrainer. Contestants alternate. The report is rewritten after each run.
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path

import torch
from contest import (
    BENCHMARKS,
    ContestantResult,
    RunSetup,
    add_arguments,
    format_steps,
    format_versions,
    run_contestant,
    run_process,
    run_tunekit,
    tunekit_config,
)
from picture import bars
from stage import Shape, Work, prepare, write, write_rows

from tunekit.env_info import describe_hardware

METHODS = ("lora", "qlora", "full")


def sft_config(setup: RunSetup, task: Work, folder: Path) -> dict:
    """Config of tunekit's recipe sft."""
    source, length = str(folder / "texts.jsonl"), task.length
    data = {"kind": "text", "source": source, "max_length": length, "packing": True, "shuffle": False}
    lora = {"kind": "lora", "rank": task.rank, "alpha": task.alpha, "adapter_path": str(setup.folder / "adapter")}
    adapter = "none" if task.method == "full" else lora
    return tunekit_config(setup, task, recipe="sft", data=data, adapter=adapter)


def tunekit(setup: RunSetup, task: Work, folder: Path, overrides: tuple[str, ...] = ()) -> tuple[dict, int]:
    """One `tune run sft` with `overrides`."""
    return run_tunekit(setup, sft_config(setup, task, folder), folder, overrides)


def turn(setup: RunSetup, task: Work, results: ContestantResult, folder: Path, drop: int) -> None:
    """One run of one contestant."""
    start = time.perf_counter()
    try:
        is_tunekit = results.name == "tunekit"
        measured, process_bytes = (
            tunekit(setup, task, folder) if is_tunekit else run_contestant(setup, results.name, "sft", folder)
        )
        results.add_run(measured, process_bytes, drop)
        message = f"{results.step:.2f} s a step"
    except (RuntimeError, OSError) as error:
        results.fault = message = str(error)
    spent = time.perf_counter() - start
    print(f"{task.method} {task.length} {results.name}: {message} ({spent:.0f} s in all)", flush=True)


def table(task: Work, shape: Shape, results: list[ContestantResult], limits: dict) -> str:
    """A row per contestant, then all steps."""
    shown = [f for f in results if f.seconds]
    ours = next((f for f in shown if f.name == "tunekit"), None)
    last = min((len(f.losses) for f in shown), default=0)  # the last step that all contestants have reached
    text = f"\n## {title(task)}\n\n"
    text += "| | s a step | target tokens/s | tunekit's speed is | peak GiB, training (process) | tunekit's memory is "
    text += f"| first loss | loss at step {last} | of the matmul limit |\n|---|---|---|---|---|---|---|---|---|\n"
    for f in shown:
        peak, process_peak = f.memory
        times = f.step / ours.step if ours else float("nan")
        share = ours.memory[0] / peak if ours else float("nan")
        text += f"| {f.name} | {f.step:.2f} | {task.num_target_tokens / f.step:.0f} | {times:.2f} x "
        text += f"| {peak:.2f} ({process_peak:.2f}) "
        text += f"| {share:.2f} x | {f.losses[0]:.5f} | {f.losses[last - 1]:.5f} "
        text += f"| {task.flops(shape) / f.step / limits['matmul']:.0%} |\n"
    return text + format_steps(results)


def title(task: Work) -> str:
    return f"{task.method}, {task.batch} packed rows of {task.length:,}"


def report(works: dict[Work, list[ContestantResult]], shape: Shape, limits: dict, line: str) -> str:
    """The complete report."""
    all_results = [*chain.from_iterable(works.values())]
    threads = {result.threads for result in all_results if result.threads}
    text = f"# Side by side on the CPU, {date.today()}\n\n`{line}`\n\n"
    text += f"{describe_hardware(torch.device('cpu'))}; "
    text += f"Python {platform.python_version()}, {format_versions(all_results)}; "
    text += f"threads: {', '.join(map(str, sorted(threads)))}.\n"
    text += f"A Llama of {shape.layers} layers, dim {shape.dim}, {shape.heads}/{shape.kv_heads} heads, hidden "
    text += f"{shape.hidden}, vocabulary {shape.vocab:,}, tied. Medians of all kept steps.\n\n"
    text += (
        f"Limits measured in this run: copying {limits['copy'] / 1e9:.1f} GB/s (read and written), products of bf16 "
    )
    text += f"{limits['matmul'] / 1e9:.0f} GFLOP/s (side {limits['side']:,}).\n"
    return text + "".join(table(task, shape, results, limits) for task, results in works.items())


def restore(file: Path, works: dict[Work, list[ContestantResult]]) -> dict:
    """Load results and limits of earlier calls. Failed contestants run again."""
    earlier = json.loads(file.read_text()) if file.is_file() else {"limits": {}, "works": {}}
    for task, results in works.items():
        earlier_results = {
            result["name"]: ContestantResult(**{**result, "fault": ""})
            for result in earlier["works"].get(title(task), [])
        }
        works[task] = [earlier_results.get(result.name, result) for result in results]
    return earlier["limits"]


def limited(setup: RunSetup, known: dict) -> dict:
    """Best rates of this machine over all calls, since other processes may slow it down."""
    out = setup.folder / "limits.txt"
    run_process(
        setup, ["bash", "-c", f"{shlex.quote(sys.executable)} {shlex.quote(str(BENCHMARKS / 'limits.py'))} > {out}"]
    )
    now = json.loads(out.read_text())
    if known.get("matmul", 0) > now["matmul"]:
        now |= {name: known[name] for name in ("matmul", "side")}
    return now | {"copy": max(now["copy"], known.get("copy", 0))}


def race(setup: RunSetup, shape: Shape, works: dict[Work, list[ContestantResult]], args: argparse.Namespace) -> None:
    """All rounds. The report is written after each run."""
    file = args.results / f"{date.today()}-compare-{args.name}"
    limits = restore(file.with_suffix(".json"), works) if args.append else {}
    line = "python benchmarks/compare.py " + " ".join(sys.argv[1:])
    for task in works:
        write_rows(setup.folder / task.method, shape, task)
    for _ in range(args.rounds):
        limits = limited(setup, limits)
        for task, results in works.items():
            for result in results:
                turn(setup, task, result, setup.folder / task.method, args.drop)
                write_report(file, works, shape, limits, line)
    write_report(file, works, shape, limits, line)


def write_report(file: Path, works: dict[Work, list[ContestantResult]], shape: Shape, limits: dict, line: str) -> None:
    """Write the report, its data and its plot."""
    file.with_suffix(".md").write_text(report(works, shape, limits, line))
    data = {title(task): [vars(result) for result in results] for task, results in works.items()}
    write(file.with_suffix(".json"), {"limits": limits, "works": data})
    shown = {title(task): [f for f in results if f.seconds] for task, results in works.items()}
    speed = {
        t: {f.name: task.num_target_tokens / f.step for f in fs}
        for (t, fs), task in zip(shown.items(), works, strict=True)
    }
    memory = {t: {f.name: f.memory[0] for f in fs} for t, fs in shown.items()}
    bars(file.with_suffix(".png"), {"target tokens per second": speed, "peak resident memory, GiB": memory})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help=f"of {', '.join(METHODS)}")
    for name in ("trl", "torchtune"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"of the environment with {name}")
    parser.add_argument("--wrapped", action="store_true", help="trl also without boundaries of documents")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser, steps=6)
    parser.add_argument("--append", action="store_true", help="rounds to those of the same day and name")
    parser.add_argument("--name", default="cpu", help="in the names of the files written")
    args = parser.parse_args()
    if wrong := set(args.methods) - set(METHODS):
        parser.error(f"{', '.join(wrong)}: none of {', '.join(METHODS)}")
    pythons = {name: python for name in ("trl", "torchtune") if (python := vars(args)[name])}
    names = ["tunekit", *pythons, *(["trl, wrapped"] if args.wrapped and "trl" in pythons else [])]
    shape = replace(Shape(), layers=args.layers)
    base = Work(length=args.length, batch=args.batch, steps=args.steps)
    with tempfile.TemporaryDirectory() as folder:
        setup = RunSetup.from_args(args, folder, **pythons)
        prepare(setup.folder, shape, base)
        works = {replace(base, method=method): [ContestantResult(name) for name in names] for method in args.methods}
        race(setup, shape, works, args)


if __name__ == "__main__":
    main()
