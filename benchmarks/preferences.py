"""DPO with tunekit beside transformers + peft + trl (+ bitsandbytes), in turns: pairs a second, memory, losses.

python benchmarks/preferences.py lora qlora --trl PYTHON --rounds 3

Both train the same pairs in the same order from the same checkpoint and adapter; the reference is the model with its
adapter off. A pair has a prompt of 256 tokens and two answers of 64 to 192. tunekit goes through `tune run preference`.
"""

import argparse
import json
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
from compare import PACKAGES, Found, Given, start
from stage import Shape, Work, prepare, write

from tunekit.machine import hardware, versions

# A step of packed rows has about as many pairs as `batch` says: they are counted by their learnt tokens.
HERE = Path(__file__).parent
PROMPT, SHORT, LONG = 256, 64, 192  # tokens, of answers from and to


@dataclass(frozen=True)
class Pairs:
    """What both train."""

    method: str
    batch: int = 4  # pairs of a step
    steps: int = 6
    beta: float = 0.1
    lr: float = 1e-4
    rank: int = 16
    alpha: int = 32


@dataclass
class Rated(Found):
    """One contestant, whose steps may have different numbers of pairs."""

    pairs: list[list[float]] = field(default_factory=list)  # of the kept steps, by round

    @property
    def rate(self) -> float:
        """Pairs a second."""
        return statistics.median(sum(n) / sum(s) for n, s in zip(self.pairs, self.seconds, strict=True))

    def take(self, told: dict, whole: int, drop: int) -> None:
        super().take(told, whole, drop)
        self.pairs.append(told["pairs"][drop:])


def rows(folder: Path, shape: Shape, work: Pairs) -> None:
    """Pairs as text, of words that are a token each."""
    folder.mkdir(exist_ok=True)
    random, lines = np.random.default_rng(1), []

    def words(count: int) -> str:
        tokens = (random.pareto(1.0, count) * 20).astype(int) % (shape.vocab - 1) + 1
        return " ".join(f"w{token}" for token in tokens)

    for _ in range(work.batch * work.steps):
        chosen, rejected = (" " + words(int(n) - 1) for n in random.integers(SHORT, LONG, 2, endpoint=True))
        lines.append(json.dumps({"prompt": words(PROMPT), "chosen": chosen, "rejected": rejected}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    write(folder / "work.json", asdict(work) | asdict(shape))


def dpo(given: Given, work: Pairs, folder: Path) -> dict:
    """The config of tunekit."""
    source, length = str(folder / "pairs.jsonl"), PROMPT + LONG
    data = {"kind": "preference", "source": source, "length": length, "pack": True, "shuffle": False}
    adapter = {"kind": "lora", "rank": work.rank, "alpha": work.alpha}
    return {
        "recipe": "preference",
        "model": str(given.folder / "model"),
        "data": data,
        "loss": {"kind": "dpo", "beta": work.beta},
        "weights": "nf4" if work.method == "qlora" else "plain",
        "adapter": adapter,
        "optimizer": {"kind": "adamw", "lr": work.lr, "betas": [0.9, 0.999]},
        "schedule": "constant",
        "precision": {"compute": "bf16", "trained": "fp32", "frozen": "bf16"},
        "batch": work.batch,
        "micro_batch": work.batch,
        "steps": work.steps,
        "device": "cpu",
    }


def tunekit(given: Given, work: Pairs, folder: Path) -> tuple[dict, int]:
    """One `tune run preference`; its numbers are those of its metrics.jsonl."""
    out = folder / f"run{time.time_ns()}"
    write(folder / "dpo.yaml", dpo(given, work, folder))  # JSON is YAML
    tune = Path(sys.executable).with_name("tune")
    whole = start(given, [str(tune), "run", "preference", str(folder / "dpo.yaml"), f"out={out}"])
    steps = [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "seconds" in line]
    told = {"seconds": [s["seconds"] for s in steps], "losses": [s["loss"] for s in steps]}
    each = sum(s["learnt"] for s in steps) / (work.batch * work.steps)  # learnt tokens of a pair
    told |= {
        "pairs": [s["learnt"] / each for s in steps],
        "peak": steps[-1]["memory_peak_bytes"],
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    shutil.rmtree(out)
    return told, whole


def other(given: Given, name: str, work: Pairs, folder: Path) -> tuple[dict, int]:
    """One run of trl; what stands behind a comma is a flag."""
    script, *flags = name.split(", ")
    out = folder / "told.json"
    out.unlink(missing_ok=True)
    line = [given.pythons[script], str(HERE / "contestants" / f"{script}_dpo.py"), str(given.folder), str(folder)]
    whole = start(given, [*line, str(out), *(f"--{flag}" for flag in flags)])
    told = json.loads(out.read_text())
    return told | {"pairs": [work.batch] * len(told["seconds"])}, whole


def table(work: Pairs, found: list[Rated]) -> str:
    """A row for each contestant, then all steps."""
    shown = [f for f in found if f.seconds]
    if not shown:
        return ""
    ours = shown[0]
    text = f"\n## {work.method}, {work.batch} pairs a step\n\n| | s a step | pairs/s | tunekit's speed is "
    text += (
        "| peak GiB, training (process) | tunekit's memory is | losses of the steps |\n|---|---|---|---|---|---|---|\n"
    )
    for f in shown:
        peak, whole = statistics.median(f.peaks), statistics.median(f.whole)
        text += f"| {f.name} | {f.step:.2f} | {f.rate:.2f} | {ours.rate / f.rate:.2f} x "
        text += f"| {peak / 2**30:.2f} ({whole / 2**30:.2f}) | {statistics.median(ours.peaks) / peak:.2f} x "
        text += f"| {' '.join(f'{loss:.4f}' for loss in f.losses)} |\n"
    text += "".join(f"\n{f.name} failed: {f.fault}\n" for f in found if f.fault)
    text += "\nSeconds of all kept steps, by round:\n\n"
    for f in shown:
        text += f"- {f.name}: " + "; ".join(" ".join(f"{s:.2f}" for s in each) for each in f.seconds) + "\n"
    return text


def report(works: dict[Pairs, list[Rated]], shape: Shape) -> str:
    """The whole page."""
    known = {name: v for found in works.values() for one in found for name, v in one.versions.items()}
    told = ", ".join(f"{name} {known[name]}" for name in PACKAGES if name in known)
    text = (
        f"# DPO side by side on the CPU, {date.today()}\n\n`python benchmarks/preferences.py {' '.join(sys.argv[1:])}`"
    )
    text += f"\n\n{hardware(torch.device('cpu'))}; Python {platform.python_version()}, {told}.\n"
    text += f"A Llama of {shape.layers} layers, dim {shape.dim}, vocabulary {shape.vocab:,}, tied. Prompts of {PROMPT} "
    text += f"tokens, answers of {SHORT} to {LONG}. Medians of all kept steps.\n"
    return text + "".join(table(work, found) for work, found in works.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help="of lora, qlora")
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="of the environment with trl")
    parser.add_argument("--flat", action="store_true", help="trl also without padding")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--drop", type=int, default=2, help="first steps that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30, help="fewer, for a quick look")
    parser.add_argument("--under", default="", metavar="COMMAND", help="what each process is started by")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    shape, names = replace(Shape(), layers=args.layers), ["tunekit", "trl", *(["trl, flat"] if args.flat else [])]
    works = {Pairs(method, steps=args.steps): [Rated(name) for name in names] for method in args.methods}
    with tempfile.TemporaryDirectory() as folder:
        given = Given(Path(folder), tuple(shlex.split(args.under)), {"trl": args.trl})
        prepare(given.folder, shape, Work())
        for _, (work, found) in ((n, item) for n in range(args.rounds) for item in works.items()):
            rows(given.folder / work.method, shape, work)
            for one in found:
                run = tunekit(given, work, given.folder / work.method) if one.name == "tunekit" else None
                told, whole = run or other(given, one.name, work, given.folder / work.method)
                one.take(told, whole, args.drop)
                print(f"{work.method} {one.name}: {one.rate:.2f} pairs a second", flush=True)
            (args.results / f"{date.today()}-preferences.md").write_text(report(works, shape))


if __name__ == "__main__":
    main()
