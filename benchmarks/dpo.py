"""DPO with tunekit compared with transformers + peft + trl (+ bitsandbytes): pairs per second, memory, losses.

    python benchmarks/dpo.py lora qlora --trl PYTHON --rounds 3

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
from library_runs import (
    LibraryResult,
    RunSetup,
    add_arguments,
    build_tunekit_config,
    format_step_times,
    format_versions,
    run_library,
    run_tunekit,
)
from reporting import CPU
from training_inputs import LlamaShape, TrainingTask, decode, sample_token_ids, write_checkpoint, write_json

from tunekit.env_info import describe_hardware

PROMPT_LENGTH, MIN_ANSWER_LENGTH, MAX_ANSWER_LENGTH = 256, 64, 192  # tokens
HEADER = """
| | step time, s | pairs/s | speed of tunekit | peak GiB, training (process) | memory of tunekit | loss by step |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class DPOTask(TrainingTask):
    """`batch_size` pairs per step; with packing, their number varies around it."""

    beta: float = 0.1


@dataclass
class DPOResult(LibraryResult):
    """Measurements of one library, whose steps may have different numbers of pairs."""

    num_pairs: list[list[float]] = field(default_factory=list)  # of the measured steps, by round

    @property
    def pairs_per_second(self) -> float:
        return statistics.median(sum(n) / sum(s) for n, s in zip(self.num_pairs, self.seconds, strict=True))

    def add_run(self, measurements: dict, process_bytes: int, warmup_steps: int) -> None:
        super().add_run(measurements, process_bytes, warmup_steps)
        self.num_pairs.append(measurements["num_pairs"][warmup_steps:])


def write_pairs(directory: Path, shape: LlamaShape, task: DPOTask) -> None:
    """Write pairs as text whose words are single tokens."""
    directory.mkdir(exist_ok=True)
    rng, lines = np.random.default_rng(1), []
    for _ in range(task.batch_size * task.steps):
        lengths = rng.integers(MIN_ANSWER_LENGTH, MAX_ANSWER_LENGTH, 2, endpoint=True)
        chosen, rejected = (" " + decode(sample_token_ids(rng, shape.vocab, int(n) - 1)) for n in lengths)
        prompt = decode(sample_token_ids(rng, shape.vocab, PROMPT_LENGTH))
        lines.append(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    (directory / "pairs.jsonl").write_text("".join(lines))
    write_json(directory / "task.json", asdict(task) | asdict(shape))


def run_dpo(setup: RunSetup, name: str, task: DPOTask) -> tuple[dict, int]:
    """Run one library; return its measurements, and the peak bytes of the process."""
    directory = setup.directory / task.method
    if name == "tunekit":
        return run_tunekit_dpo(setup, task, directory)
    measurements, process_bytes = run_library(setup, name, "dpo", directory)
    return measurements | {"num_pairs": [task.batch_size] * len(measurements["seconds"])}, process_bytes


def run_tunekit_dpo(setup: RunSetup, task: DPOTask, directory: Path) -> tuple[dict, int]:
    """Run `tune run preference`. The number of pairs of a step is derived from its target tokens."""
    source, max_length = str(directory / "pairs.jsonl"), PROMPT_LENGTH + MAX_ANSWER_LENGTH
    data = {"kind": "preference", "source": source, "max_length": max_length, "packing": True, "shuffle": False}
    adapter = {"kind": "lora", "rank": task.rank, "alpha": task.alpha}
    loss = {"kind": "dpo", "beta": task.beta}
    config = build_tunekit_config(setup, task, recipe="preference", data=data, adapter=adapter, loss=loss)
    measurements, process_bytes = run_tunekit(setup, config, directory)
    tokens_per_pair = sum(measurements["target_tokens"]) / (task.batch_size * task.steps)
    return measurements | {"num_pairs": [n / tokens_per_pair for n in measurements["target_tokens"]]}, process_bytes


def format_table(task: DPOTask, all_results: list[DPOResult]) -> str:
    """A row per library, then the times of all steps."""
    results = [result for result in all_results if result.seconds]
    if not results:
        return ""
    baseline = results[0]
    text = f"\n## {task.method}, {task.batch_size} pairs per step\n{HEADER}"
    for result in results:
        speedup = baseline.pairs_per_second / result.pairs_per_second
        text += f"| {result.name} | {result.step_time:.2f} | {result.pairs_per_second:.2f} | {speedup:.2f} x "
        memory_ratio = baseline.peak_gib / result.peak_gib
        text += f"| {result.peak_gib:.2f} ({result.process_peak_gib:.2f}) | {memory_ratio:.2f} x "
        text += f"| {' '.join(f'{loss:.4f}' for loss in result.losses)} |\n"
    return text + format_step_times(all_results)


def format_report(results: dict[DPOTask, list[DPOResult]], shape: LlamaShape) -> str:
    versions = format_versions(chain.from_iterable(results.values()))
    text = f"# DPO compared on the CPU, {date.today()}\n\n`python benchmarks/dpo.py {' '.join(sys.argv[1:])}`\n\n"
    text += f"{describe_hardware(CPU)}; Python {platform.python_version()}, {versions}.\n"
    text += f"A Llama with {shape.layers} layers, dim {shape.dim}, vocabulary {shape.vocab:,}, tied embeddings. "
    text += f"Prompts of {PROMPT_LENGTH} tokens, answers of {MIN_ANSWER_LENGTH} to {MAX_ANSWER_LENGTH}. "
    text += "Medians of all measured steps.\n"
    return text + "".join(format_table(task, library_results) for task, library_results in results.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["lora"], help="lora, qlora")
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="interpreter of the environment with trl")
    parser.add_argument("--padding-free", action="store_true", help="also run trl with padding_free")
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser, steps=6)
    args = parser.parse_args()
    shape = replace(LlamaShape(), layers=args.layers)
    names = ["tunekit", "trl", *(["trl, padding-free"] if args.padding_free else [])]
    all_results = {DPOTask(method, steps=args.steps): [DPOResult(name) for name in names] for method in args.methods}
    with tempfile.TemporaryDirectory() as directory:
        setup = RunSetup.from_args(args, directory, trl=args.trl)
        write_checkpoint(setup.directory, shape, DPOTask())
        for task in all_results:
            write_pairs(setup.directory / task.method, shape, task)
        for _ in range(args.rounds):
            for task, results in all_results.items():
                for result in results:
                    result.add_run(*run_dpo(setup, result.name, task), args.warmup_steps)
                    print(f"{task.method} {result.name}: {result.pairs_per_second:.2f} pairs/s", flush=True)
                report = format_report(all_results, shape)
                (args.results / f"{date.today()}-dpo.md").write_text(report)


if __name__ == "__main__":
    main()
