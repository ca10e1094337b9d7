"""tunekit beside transformers + peft + trl (+ bitsandbytes) and torchtune, in turns: speed, memory, losses, a picture.

python benchmarks/compare.py lora qlora full --trl PYTHON --torchtune PYTHON --length 512 --rounds 3

Each contestant is a process in an environment of its own (benchmarks/README.md says how to make them), on the same
checkpoint, the same packed rows in the same order and, with LoRA, the same initial adapter. tunekit goes through `tune
run sft`, torchtune through its own recipe, trl through SFTTrainer. The report is written anew after every run.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch
from picture import bars
from stage import Shape, Work, prepare, rows, write

from tunekit.machine import hardware, versions

HERE = Path(__file__).parent
METHODS = ("lora", "qlora", "full")
PACKAGES = ("torch", "tunekit", "transformers", "peft", "trl", "bitsandbytes", "torchtune", "torchao")


@dataclass(frozen=True)
class Given:
    """Where things are, and how processes are started."""

    folder: Path
    under: tuple[str, ...]  # a command that starts each process: numactl, a lock
    pythons: dict[str, str]


@dataclass
class Found:
    """What one contestant has shown at one work, over all rounds."""

    name: str
    seconds: list[list[float]] = field(default_factory=list)  # of the kept steps, by round
    losses: list[float] = field(default_factory=list)  # by step
    peaks: list[int] = field(default_factory=list)  # bytes at the last step, by round
    whole: list[int] = field(default_factory=list)  # bytes, the whole process with its start and end
    versions: dict[str, str] = field(default_factory=dict)
    threads: int = 0
    fault: str = ""

    @property
    def step(self) -> float:
        return statistics.median(s for round in self.seconds for s in round)

    def take(self, told: dict, whole: int, drop: int) -> None:
        self.seconds.append(told["seconds"][drop:])
        self.losses = told["losses"]
        self.peaks.append(told["peak"])
        self.whole.append(whole)
        self.versions, self.threads = told["versions"], told["threads"]


def sft(given: Given, work: Work, folder: Path) -> dict:
    """The config of tunekit."""
    train = {"kind": "lora", "rank": work.rank, "alpha": work.alpha, "start": str(given.folder / "adapter")}
    full = work.method == "full"
    return {
        "recipe": "sft",
        "model": str(given.folder / "model"),
        "data": {
            "kind": "text",
            "source": str(folder / "texts.jsonl"),
            "length": work.length,
            "pack": True,
            "shuffle": False,
        },
        "weights": "nf4" if work.method == "qlora" else "plain",
        "adapter": "full" if full else train,
        "optimizer": {"kind": "adamw", "lr": work.lr, "betas": [0.9, 0.999]},
        "schedule": "constant",
        "precision": {"compute": "bf16", "trained": "bf16" if full else "fp32", "frozen": "bf16"},
        "batch": work.batch,
        "micro_batch": work.batch,
        "steps": work.steps,
        "device": "cpu",
    }


def tunekit(given: Given, work: Work, folder: Path, more: tuple[str, ...] = ()) -> tuple[dict, int]:
    """One `tune run sft`; its numbers are those of its metrics.jsonl."""
    out = folder / f"run{time.time_ns()}"
    write(folder / "sft.yaml", sft(given, work, folder))  # JSON is YAML
    tune = Path(sys.executable).with_name("tune")
    whole = start(given, [str(tune), "run", "sft", str(folder / "sft.yaml"), f"out={out}", *more])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line]
    told = {"seconds": [s["seconds"] for s in steps], "losses": [s["loss"] for s in steps]}
    told |= {"peak": steps[-1]["memory_peak_bytes"], "versions": versions(), "threads": torch.get_num_threads()}
    shutil.rmtree(out)  # gigabytes a run
    return told, whole


def other(given: Given, name: str, folder: Path) -> tuple[dict, int]:
    """One run of a contestant that is a script beside this one; "trl, wrapped" is trl with `--wrapped`."""
    script, *flags = name.split(", ")
    out = folder / "told.json"
    out.unlink(missing_ok=True)
    line = [given.pythons[script], str(HERE / "contestants" / f"{script}_sft.py"), str(given.folder), str(folder)]
    whole = start(given, [*line, str(out), *(f"--{flag}" for flag in flags)])
    return json.loads(out.read_text()), whole


def start(given: Given, line: list[str]) -> int:
    """Run a command to its end; bytes that it had resident at most."""
    log = given.folder / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen([*given.under, *line], stdout=stream, stderr=stream, cwd=given.folder)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = [text for text in log.read_text().splitlines() if text.strip()]
        raise RuntimeError(f"exit {process.returncode}: {said[-1] if said else 'nothing said'}")
    return used.ru_maxrss * 1024


def turn(given: Given, work: Work, found: Found, folder: Path, drop: int) -> None:
    """One run of one contestant."""
    began = time.perf_counter()
    try:
        told, whole = tunekit(given, work, folder) if found.name == "tunekit" else other(given, found.name, folder)
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
        peak, whole = statistics.median(f.peaks) / 2**30, statistics.median(f.whole) / 2**30
        times = f.step / ours.step if ours else float("nan")
        share = statistics.median(ours.peaks) / 2**30 / peak if ours else float("nan")
        text += f"| {f.name} | {f.step:.2f} | {work.learnt / f.step:.0f} | {times:.2f} x | {peak:.2f} ({whole:.2f}) "
        text += f"| {share:.2f} x | {f.losses[0]:.5f} | {f.losses[last - 1]:.5f} "
        text += f"| {work.flops(shape) / f.step / limits['matmul']:.0%} |\n"
    text += "".join(f"\n{f.name} failed: {f.fault}\n" for f in found if f.fault)
    text += "\nSeconds of all kept steps, by round:\n\n"
    for f in shown:
        text += f"- {f.name}: " + "; ".join(" ".join(f"{s:.2f}" for s in round) for round in f.seconds) + "\n"
    return text


def title(work: Work) -> str:
    return f"{work.method}, {work.batch} packed rows of {work.length:,}"


def report(works: dict[Work, list[Found]], shape: Shape, limits: dict, line: str) -> str:
    """The whole page."""
    known: dict[str, str] = {}
    for found in works.values():
        for one in found:
            known |= {name: v for name, v in one.versions.items() if name in PACKAGES}
    told = ", ".join(f"{name} {known[name]}" for name in PACKAGES if name in known)
    threads = {one.threads for found in works.values() for one in found if one.threads}
    text = f"# Side by side on the CPU, {date.today()}\n\n`{line}`\n\n"
    text += f"{hardware(torch.device('cpu'))}; Python {platform.python_version()}, {told}; "
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
    memory = {t: {f.name: statistics.median(f.peaks) / 2**30 for f in fs} for t, fs in shown.items()}
    bars(file.with_suffix(".png"), {"learnt tokens a second": speed, "peak resident memory, GiB": memory})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help=f"of {', '.join(METHODS)}")
    for name in ("trl", "torchtune"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"of the environment with {name}")
    parser.add_argument("--wrapped", action="store_true", help="trl also without boundaries of documents")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--drop", type=int, default=2, help="first steps that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30, help="fewer, for a quick look")
    parser.add_argument(
        "--under", default="", metavar="COMMAND", help="what each process is started by, such as a lock"
    )
    parser.add_argument("--append", action="store_true", help="rounds to those of the same day and name")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="cpu", help="in the names of the files written")
    args = parser.parse_args()
    if wrong := set(args.methods) - set(METHODS):
        parser.error(f"{', '.join(wrong)}: none of {', '.join(METHODS)}")
    pythons = {name: python for name in ("trl", "torchtune") if (python := vars(args)[name])}
    names = ["tunekit", *pythons, *(["trl, wrapped"] if args.wrapped and "trl" in pythons else [])]
    shape = replace(Shape(), layers=args.layers)
    base = Work(length=args.length, batch=args.batch, steps=args.steps)
    with tempfile.TemporaryDirectory() as folder:
        given = Given(Path(folder), tuple(shlex.split(args.under)), pythons)
        prepare(given.folder, shape, base)
        works = {replace(base, method=method): [Found(name) for name in names] for method in args.methods}
        race(given, shape, works, args)


if __name__ == "__main__":
    main()
