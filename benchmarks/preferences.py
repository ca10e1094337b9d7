"""DPO with tunekit beside transformers + peft + trl (+ bitsandbytes), in turns: pairs a second, memory, losses.

python benchmarks/preferences.py lora qlora --trl PYTHON --rounds 3

Both train the same pairs in the same order from the same checkpoint and adapter; the reference is the model with its
adapter off. A pair has a prompt of 256 tokens and two answers of 64 to 192. tunekit goes through `tune run preference`.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from contest import Found, Given, config, kept_steps, options, other, packages, tune
from stage import Shape, Task, prepare, write

from tunekit.env_info import describe_hardware

# A step of packed rows has about as many pairs as `batch` says: they are counted by their learnt tokens.
PROMPT, SHORT, LONG = 256, 64, 192  # tokens, of answers from and to


@dataclass(frozen=True)
class Pairs(Task):
    """`batch` pairs a step."""

    beta: float = 0.1


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


def tunekit(given: Given, work: Pairs, folder: Path) -> tuple[dict, int]:
    """One `tune run preference`, with the pairs of its steps."""
    source, length = str(folder / "pairs.jsonl"), PROMPT + LONG
    data = {"kind": "preference", "source": source, "max_length": length, "packing": True, "shuffle": False}
    adapter = {"kind": "lora", "rank": work.rank, "alpha": work.alpha}
    loss = {"kind": "dpo", "beta": work.beta}
    dpo = config(given, work, recipe="preference", data=data, adapter=adapter, loss=loss)
    told, whole = tune(given, dpo, folder)
    each = sum(told["learnt"]) / (work.batch * work.steps)  # learnt tokens of a pair
    return told | {"pairs": [learnt / each for learnt in told["learnt"]]}, whole


def trl(given: Given, name: str, work: Pairs, folder: Path) -> tuple[dict, int]:
    told, whole = other(given, name, "dpo", folder)
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
        peak, whole = f.memory
        text += f"| {f.name} | {f.step:.2f} | {f.rate:.2f} | {ours.rate / f.rate:.2f} x "
        text += f"| {peak:.2f} ({whole:.2f}) | {ours.memory[0] / peak:.2f} x "
        text += f"| {' '.join(f'{loss:.4f}' for loss in f.losses)} |\n"
    return text + kept_steps(found)


def report(works: dict[Pairs, list[Rated]], shape: Shape) -> str:
    """The whole page."""
    told = packages(chain.from_iterable(works.values()))
    text = (
        f"# DPO side by side on the CPU, {date.today()}\n\n`python benchmarks/preferences.py {' '.join(sys.argv[1:])}`"
    )
    text += f"\n\n{describe_hardware(torch.device('cpu'))}; Python {platform.python_version()}, {told}.\n"
    text += f"A Llama of {shape.layers} layers, dim {shape.dim}, vocabulary {shape.vocab:,}, tied. Prompts of {PROMPT} "
    text += f"tokens, answers of {SHORT} to {LONG}. Medians of all kept steps.\n"
    return text + "".join(table(work, found) for work, found in works.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help="of lora, qlora")
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="of the environment with trl")
    parser.add_argument("--flat", action="store_true", help="trl also without padding")
    parser.add_argument("--rounds", type=int, default=3)
    options(parser, steps=6)
    args = parser.parse_args()
    shape, names = replace(Shape(), layers=args.layers), ["tunekit", "trl", *(["trl, flat"] if args.flat else [])]
    works = {Pairs(method, steps=args.steps): [Rated(name) for name in names] for method in args.methods}
    with tempfile.TemporaryDirectory() as folder:
        given = Given.of(args, folder, trl=args.trl)
        prepare(given.folder, shape, Pairs())
        for _, (work, found) in ((n, item) for n in range(args.rounds) for item in works.items()):
            rows(given.folder / work.method, shape, work)
            for one in found:
                run = tunekit(given, work, given.folder / work.method) if one.name == "tunekit" else None
                told, whole = run or trl(given, one.name, work, given.folder / work.method)
                one.take(told, whole, args.drop)
                print(f"{work.method} {one.name}: {one.rate:.2f} pairs a second", flush=True)
            (args.results / f"{date.today()}-preferences.md").write_text(report(works, shape))


if __name__ == "__main__":
    main()
