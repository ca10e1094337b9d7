"""tunekit beside transformers + peft + trl (+ bitsandbytes) and torchtune, in turns: speed, memory, losses, a picture.

python benchmarks/compare.py lora qlora full --trl PYTHON --torchtune PYTHON --length 512 --rounds 3

Each contestant is a process in an environment of its own (benchmarks/README.md says how to make them), on the same
checkpoint, the same packed rows in the same order and, with LoRA, the same initial adapter. tunekit goes through `tune
run sft`, torchtune through its own recipe, trl through SFTTrainer. The report is written anew after every run.
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
from contest import HERE, Found, Given, config, kept_steps, options, other, packages, start, tune
from picture import bars
from stage import Shape, Work, prepare, rows, write

from tunekit.env_info import describe_hardware

METHODS = ("lora", "qlora", "full")


def tunekit(given: Given, work: Work, folder: Path, more: tuple[str, ...] = ()) -> tuple[dict, int]:
    """One `tune run sft`, of which each word of `more` changes the config."""
    source, length = str(folder / "texts.jsonl"), work.length
    data = {"kind": "text", "source": source, "max_length": length, "packing": True, "shuffle": False}
    lora = {"kind": "lora", "rank": work.rank, "alpha": work.alpha, "start": str(given.folder / "adapter")}
    adapter = "full" if work.method == "full" else lora
    sft = config(given, work, recipe="sft", data=data, adapter=adapter)
    return tune(given, sft, folder, more)


def turn(given: Given, work: Work, found: Found, folder: Path, drop: int) -> None:
    """One run of one contestant."""
    began = time.perf_counter()
    try:
        own = found.name == "tunekit"
        told, whole = tunekit(given, work, folder) if own else other(given, found.name, "sft", folder)
        found.take(told, whole, drop)
        said = f"{found.step:.2f} s a step"
    except (RuntimeError, OSError) as error:
        found.fault = said = str(error)
    spent = time.perf_counter() - began
    print(f"{work.method} {work.length} {found.name}: {said} ({spent:.0f} s in all)", flush=True)


def table(work: Work, shape: Shape, found: list[Found], limits: dict) -> str:
    """A row for each contestant, then all steps."""
    shown = [f for f in found if f.seconds]
    ours = next((f for f in shown if f.name == "tunekit"), None)
    last = min((len(f.losses) for f in shown), default=0)  # which all have reached, also one that was stopped early
    text = f"\n## {title(work)}\n\n"
    text += "| | s a step | learnt tokens/s | tunekit's speed is | peak GiB, training (process) | tunekit's memory is "
    text += f"| first loss | loss at step {last} | of the matmul limit |\n|---|---|---|---|---|---|---|---|---|\n"
    for f in shown:
        peak, whole = f.memory
        times = f.step / ours.step if ours else float("nan")
        share = ours.memory[0] / peak if ours else float("nan")
        text += f"| {f.name} | {f.step:.2f} | {work.learnt / f.step:.0f} | {times:.2f} x | {peak:.2f} ({whole:.2f}) "
        text += f"| {share:.2f} x | {f.losses[0]:.5f} | {f.losses[last - 1]:.5f} "
        text += f"| {work.flops(shape) / f.step / limits['matmul']:.0%} |\n"
    return text + kept_steps(found)


def title(work: Work) -> str:
    return f"{work.method}, {work.batch} packed rows of {work.length:,}"


def report(works: dict[Work, list[Found]], shape: Shape, limits: dict, line: str) -> str:
    """The whole page."""
    everybody = [*chain.from_iterable(works.values())]
    threads = {one.threads for one in everybody if one.threads}
    text = f"# Side by side on the CPU, {date.today()}\n\n`{line}`\n\n"
    text += f"{describe_hardware(torch.device('cpu'))}; Python {platform.python_version()}, {packages(everybody)}; "
    text += f"threads: {', '.join(map(str, sorted(threads)))}.\n"
    text += f"A Llama of {shape.layers} layers, dim {shape.dim}, {shape.heads}/{shape.kv_heads} heads, hidden "
    text += f"{shape.hidden}, vocabulary {shape.vocab:,}, tied. Medians of all kept steps.\n\n"
    text += (
        f"Limits measured in this run: copying {limits['copy'] / 1e9:.1f} GB/s (read and written), products of bf16 "
    )
    text += f"{limits['matmul'] / 1e9:.0f} GFLOP/s (side {limits['side']:,}).\n"
    return text + "".join(table(work, shape, found, limits) for work, found in works.items())


def restore(file: Path, works: dict[Work, list[Found]]) -> dict:
    """Take up what earlier calls have found, and their limits; a fault is tried again."""
    earlier = json.loads(file.read_text()) if file.is_file() else {"limits": {}, "works": {}}
    for work, found in works.items():
        kept = {one["name"]: Found(**{**one, "fault": ""}) for one in earlier["works"].get(title(work), [])}
        works[work] = [kept.get(one.name, one) for one in found]
    return earlier["limits"]


def limited(given: Given, known: dict) -> dict:
    """The best that the machine has shown, now or before: others may use it too."""
    out = given.folder / "limits.txt"
    start(given, ["bash", "-c", f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'limits.py'))} > {out}"])
    now = json.loads(out.read_text())
    if known.get("matmul", 0) > now["matmul"]:
        now |= {name: known[name] for name in ("matmul", "side")}
    return now | {"copy": max(now["copy"], known.get("copy", 0))}


def race(given: Given, shape: Shape, works: dict[Work, list[Found]], args: argparse.Namespace) -> None:
    """All rounds. The report is written after each run, so that nothing is lost."""
    file = args.results / f"{date.today()}-compare-{args.name}"
    limits = restore(file.with_suffix(".json"), works) if args.append else {}
    line = "python benchmarks/compare.py " + " ".join(sys.argv[1:])
    for work in works:
        rows(given.folder / work.method, shape, work)
    for _ in range(args.rounds):
        limits = limited(given, limits)
        for work, found in works.items():
            for one in found:
                turn(given, work, one, given.folder / work.method, args.drop)
                keep(file, works, shape, limits, line)
    keep(file, works, shape, limits, line)


def keep(file: Path, works: dict[Work, list[Found]], shape: Shape, limits: dict, line: str) -> None:
    """The report, its numbers and its picture."""
    file.with_suffix(".md").write_text(report(works, shape, limits, line))
    told = {title(work): [vars(one) for one in found] for work, found in works.items()}
    write(file.with_suffix(".json"), {"limits": limits, "works": told})
    shown = {title(work): [f for f in found if f.seconds] for work, found in works.items()}
    speed = {t: {f.name: work.learnt / f.step for f in fs} for (t, fs), work in zip(shown.items(), works, strict=True)}
    memory = {t: {f.name: f.memory[0] for f in fs} for t, fs in shown.items()}
    bars(file.with_suffix(".png"), {"learnt tokens a second": speed, "peak resident memory, GiB": memory})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help=f"of {', '.join(METHODS)}")
    for name in ("trl", "torchtune"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"of the environment with {name}")
    parser.add_argument("--wrapped", action="store_true", help="trl also without boundaries of documents")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options(parser, steps=6)
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
        given = Given.of(args, folder, **pythons)
        prepare(given.folder, shape, base)
        works = {replace(base, method=method): [Found(name) for name in names] for method in args.methods}
        race(given, shape, works, args)


if __name__ == "__main__":
    main()
