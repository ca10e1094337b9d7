"""Speed and memory of fine-tuning, one optimization at a time: cumulative, then each alone.

    python benchmarks/ablation.py [--batch-size 4] [--steps 4]

An optimization is a set of overrides of `tune run sft`. The cumulative baseline is a simple script: all weights are
trained in fp32, and documents of very different lengths are padded to the longest.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass, replace
from datetime import date

import torch
from compare import run_tunekit_sft
from library_runs import RunSetup, add_arguments
from plots import plot_ablation
from reporting import CPU
from training_inputs import LlamaShape, SFTTask, write_checkpoint, write_sft_data

from tunekit.env_info import describe_hardware

# Relative to a row: padded to the longest, they take twice the memory
DOCUMENT_FRACTIONS = (40 / 512, 120 / 512, 352 / 512)
HEADER = """
| | step time, s | target tokens/s | peak GiB | last loss | overrides |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Optimization:
    name: str
    overrides: tuple[str, ...]

    def apply(self, overrides: tuple[str, ...]) -> tuple[str, ...]:
        """Overrides of a run, in which those of this optimization replace earlier ones of the same key."""
        keys = {override.partition("=")[0] for override in self.overrides}
        return (*(o for o in overrides if o.partition("=")[0] not in keys), *self.overrides)


CUMULATIVE_BASELINE = Optimization(
    "full, fp32, padded rows", ("precision.compute_dtype=fp32", "precision.master_dtype=fp32")
)
SINGLE_BASELINE = Optimization("full, bf16 matmuls, packed rows", ("precision.master_dtype=fp32",))
PACKING = Optimization("packed rows", ())
ADAMW = ("optimizer=adamw", "optimizer.lr=1e-4")
NO_OPTIMIZER_IN_BWD = ("memory.optimizer_in_bwd=false", "max_grad_norm=1")
CUMULATIVE_ONLY = (Optimization("bf16 matmuls", ("precision.compute_dtype=bf16",)), PACKING)
OPTIMIZATIONS = (
    Optimization("8-bit AdamW", ("optimizer=adamw8bit", "optimizer.lr=1e-4")),
    Optimization("bf16 weights", ("precision.master_dtype=bf16",)),
    Optimization("optimizer in backward", ("memory.optimizer_in_bwd=true", "max_grad_norm=0")),
    Optimization("selective activation checkpointing", ("memory.activation_checkpointing=selective",)),
    Optimization("full activation checkpointing", ("memory.activation_checkpointing=full",)),
    Optimization("LoRA", ("adapter=lora", *ADAMW, "precision.master_dtype=fp32", *NO_OPTIMIZER_IN_BWD)),
    Optimization("QLoRA", ("quantization=nf4", "adapter=lora")),
    Optimization("compile", ("compile=true",)),
)


@dataclass
class Result:
    """Measurements of one run."""

    name: str
    overrides: tuple[str, ...]  # of the optimization
    step_time: float
    tokens_per_second: float
    peak_gib: float
    last_loss: float

    def format_row(self) -> str:
        text = f"| {self.name} | {self.step_time:.2f} | {self.tokens_per_second:.0f} | {self.peak_gib:.2f} "
        return text + f"| {self.last_loss:.4f} | `{' '.join(self.overrides)}` |\n"


def measure_optimization(
    setup: RunSetup, task: SFTTask, optimization: Optimization, overrides: tuple[str, ...], warmup_steps: int
) -> Result:
    measurements, _ = run_tunekit_sft(setup, task, setup.directory / "data", overrides)
    step_time = statistics.median(measurements["seconds"][warmup_steps:])
    tokens_per_second, peak_gib = task.num_target_tokens / step_time, measurements["peak"] / 2**30
    last_loss = measurements["losses"][-1]
    result = Result(optimization.name, optimization.overrides, step_time, tokens_per_second, peak_gib, last_loss)
    print(result.format_row(), end="", flush=True)
    return result


def get_padding_overrides(task: SFTTask) -> tuple[str, ...]:
    """Overrides for padded rows with the same number of documents."""
    num_documents = task.batch_size * len(task.document_lengths)
    return "data.packing=false", f"global_batch_size={num_documents}", f"micro_batch_size={num_documents}"


def format_header(shape: LlamaShape, task: SFTTask) -> str:
    text = f"# Speed and memory, one optimization at a time, {date.today()}\n\n"
    text += f"{describe_hardware(CPU)}, torch {torch.__version__}. A Llama with "
    text += f"{shape.layers} layers, dim {shape.dim}, vocabulary {shape.vocab:,}; {task.num_tokens:,} tokens per step "
    return text + f"in documents of {', '.join(map(str, task.document_lengths))}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=4, help="packed rows of 512 tokens per step")
    add_arguments(parser, steps=4)
    args = parser.parse_args()
    shape = replace(LlamaShape(), layers=args.layers)
    task = SFTTask("full", batch_size=args.batch_size, steps=args.steps, document_fractions=DOCUMENT_FRACTIONS)
    text, file = format_header(shape, task), args.results / f"{date.today()}-ablation"
    results: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        setup = RunSetup.from_args(args, directory)
        write_checkpoint(setup.directory, shape, task)
        write_sft_data(setup.directory / "data", shape, task)
        text += f"\n## Cumulative\n{HEADER}"
        overrides, padding = (), get_padding_overrides(task)
        for optimization in (CUMULATIVE_BASELINE, *CUMULATIVE_ONLY, *OPTIMIZATIONS):
            padding = () if optimization == PACKING else padding
            overrides = optimization.apply(overrides)
            result = measure_optimization(setup, task, optimization, (*overrides, *padding), args.warmup_steps)
            results[result.name], text = (result.tokens_per_second, result.peak_gib), text + result.format_row()
            file.with_suffix(".md").write_text(text)
        plot_ablation(file.with_suffix(".png"), results)
        text += f"\n## Each alone\n{HEADER}"
        for optimization in (SINGLE_BASELINE, *OPTIMIZATIONS):
            overrides = optimization.apply(SINGLE_BASELINE.overrides)
            text += measure_optimization(setup, task, optimization, overrides, args.warmup_steps).format_row()
            file.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
