"""DPO with tunekit compared with transformers + peft + trl (+ bitsandbytes): pairs per second, memory, losses.

    python benchmarks/preferences.py lora qlora --trl PYTHON --rounds 3

Both train on the same pairs in the same order from the same checkpoint and adapter; the reference is the model with
its adapter disabled. Prompts have 256 tokens and answers 64 to 192. tunekit runs `tune run preference`.
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
from contest import (
    ContestantResult,
    RunSetup,
    add_arguments,
    format_steps,
    format_versions,
    run_contestant,
    run_tunekit,
    tunekit_config,
)
from stage import Shape, Task, prepare, write

from tunekit.env_info import describe_hardware

# A packed step has about `batch` pairs; they are counted by their target tokens.
PROMPT, SHORT, LONG = 256, 64, 192  # tokens of a prompt, and minimum and maximum of an answer


@dataclass(frozen=True)
class Pairs(Task):
    """`batch` pairs per step."""

    beta: float = 0.1


@dataclass
class PairsResult(ContestantResult):
    """Results of one contestant, whose steps may have different numbers of pairs."""

    pairs: list[list[float]] = field(default_factory=list)  # of the measured steps, by round

    @property
    def rate(self) -> float:
        """Pairs per second."""
        return statistics.median(sum(n) / sum(s) for n, s in zip(self.pairs, self.seconds, strict=True))

    def take(self, measured: dict, process_bytes: int, drop: int) -> None:
        super().add_run(measured, process_bytes, drop)
        self.pairs.append(measured["pairs"][drop:])


def write_rows(folder: Path, shape: Shape, task: Pairs) -> None:
    """Pairs as text whose words are single tokens."""
    folder.mkdir(exist_ok=True)
    random, lines = np.random.default_rng(1), []

    def words(count: int) -> str:
        tokens = (random.pareto(1.0, count) * 20).astype(int) % (shape.vocab - 1) + 1
        return " ".join(f"w{token}" for token in tokens)

    for _ in range(task.batch * task.steps):
        chosen, rejected = (" " + words(int(n) - 1) for n in random.integers(SHORT, LONG, 2, endpoint=True))
        lines.append(json.dumps({"prompt": words(PROMPT), "chosen": chosen, "rejected": rejected}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    write(folder / "work.json", asdict(task) | asdict(shape))


def tunekit(setup: RunSetup, task: Pairs, folder: Path) -> tuple[dict, int]:
    """One `tune run preference`, with the number of pairs of each step."""
    source, length = str(folder / "pairs.jsonl"), PROMPT + LONG
    data = {"kind": "preference", "source": source, "max_length": length, "packing": True, "shuffle": False}
    adapter = {"kind": "lora", "rank": task.rank, "alpha": task.alpha}
    loss = {"kind": "dpo", "beta": task.beta}
    dpo = tunekit_config(setup, task, recipe="preference", data=data, adapter=adapter, loss=loss)
    measured, process_bytes = run_tunekit(setup, dpo, folder)
    tokens_per_pair = sum(measured["target_tokens"]) / (task.batch * task.steps)
    return measured | {"pairs": [count / tokens_per_pair for count in measured["target_tokens"]]}, process_bytes


def run_trl(setup: RunSetup, name: str, task: Pairs, folder: Path) -> tuple[dict, int]:
    measured, process_bytes = run_contestant(setup, name, "dpo", folder)
    return measured | {"pairs": [task.batch] * len(measured["seconds"])}, process_bytes


def table(task: Pairs, results: list[PairsResult]) -> str:
    """A row per contestant, then all steps."""
    shown = [f for f in results if f.seconds]
    if not shown:
        return ""
    ours = shown[0]
    text = f"\n## {task.method}, {task.batch} pairs a step\n\n| | s a step | pairs/s | tunekit's speed is "
    text += (
        "| peak GiB, training (process) | tunekit's memory is | losses of the steps |\n|---|---|---|---|---|---|---|\n"
    )
    for f in shown:
        peak, process_peak = f.memory
        text += f"| {f.name} | {f.step:.2f} | {f.rate:.2f} | {ours.rate / f.rate:.2f} x "
        text += f"| {peak:.2f} ({process_peak:.2f}) | {ours.memory[0] / peak:.2f} x "
        text += f"| {' '.join(f'{loss:.4f}' for loss in f.losses)} |\n"
    return text + format_steps(results)


def report(works: dict[Pairs, list[PairsResult]], shape: Shape) -> str:
    """The complete report."""
    versions = format_versions(chain.from_iterable(works.values()))
    text = (
        f"# DPO side by side on the CPU, {date.today()}\n\n`python benchmarks/preferences.py {' '.join(sys.argv[1:])}`"
    )
    text += f"\n\n{describe_hardware(torch.device('cpu'))}; Python {platform.python_version()}, {versions}.\n"
    text += f"A Llama of {shape.layers} layers, dim {shape.dim}, vocabulary {shape.vocab:,}, tied. Prompts of {PROMPT} "
    text += f"tokens, answers of {SHORT} to {LONG}. Medians of all kept steps.\n"
    return text + "".join(table(task, results) for task, results in works.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help="of lora, qlora")
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="of the environment with trl")
    parser.add_argument("--flat", action="store_true", help="trl also without padding")
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser, steps=6)
    args = parser.parse_args()
    shape, names = replace(Shape(), layers=args.layers), ["tunekit", "trl", *(["trl, flat"] if args.flat else [])]
    works = {Pairs(method, steps=args.steps): [PairsResult(name) for name in names] for method in args.methods}
    with tempfile.TemporaryDirectory() as folder:
        setup = RunSetup.from_args(args, folder, trl=args.trl)
        prepare(setup.folder, shape, Pairs())
        for _, (task, results) in ((n, item) for n in range(args.rounds) for item in works.items()):
            write_rows(setup.folder / task.method, shape, task)
            for result in results:
                run = tunekit(setup, task, setup.folder / task.method) if result.name == "tunekit" else None
                measured, process_bytes = run or run_trl(setup, result.name, task, setup.folder / task.method)
                result.add_run(measured, process_bytes, args.drop)
                print(f"{task.method} {result.name}: {result.rate:.2f} pairs a second", flush=True)
            (args.results / f"{date.today()}-preferences.md").write_text(report(works, shape))


if __name__ == "__main__":
    main()
