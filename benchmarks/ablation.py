"""Speed and memory of fine-tuning, one optimization at a time: cumulative, then each alone.

    python benchmarks/ladder.py [--batch 4] [--steps 4]

A rung is a set of overrides of `tune run sft`. The first rung is a simple script: all weights are trained in fp32,
and documents of very different lengths are padded to the longest.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass, replace
from datetime import date

import torch
from compare import tunekit
from contest import RunSetup, add_arguments
from picture import steps
from stage import Shape, Work, prepare, write_rows

from tunekit.env_info import describe_hardware

# lengths of the documents relative to a row; padded, they take twice the memory
SHARES = (40 / 512, 120 / 512, 352 / 512)


@dataclass(frozen=True)
class Rung:
    name: str
    words: tuple[str, ...]


FIRST = Rung("full, fp32, padded rows", ("precision.compute_dtype=fp32", "precision.master_dtype=fp32"))
DEFAULT = Rung("full, bf16 products, packed", ("precision.master_dtype=fp32",))
PACKED = "packed rows"
PLAIN = ("optimizer=adamw", "optimizer.lr=1e-4")
RUNGS = (
    Rung("bf16 products", ("precision.compute_dtype=bf16",)),
    Rung(PACKED, ()),
    Rung("8-bit AdamW", ("optimizer=adamw8bit", "optimizer.lr=1e-4")),
    Rung("bf16 weights", ("precision.master_dtype=bf16",)),
    Rung("step in backward", ("memory.optimizer_in_bwd=true", "max_grad_norm=0")),
    Rung("selective recompute", ("memory.activation_checkpointing=selective",)),
    Rung("recompute of layers", ("memory.activation_checkpointing=full",)),
    Rung(
        "LoRA",
        ("adapter=lora", *PLAIN, "precision.master_dtype=fp32", "memory.optimizer_in_bwd=false", "max_grad_norm=1"),
    ),
    Rung("QLoRA", ("quantization=nf4", "adapter=lora")),
    Rung("compile", ("compile=true",)),
)


def climb(setup: RunSetup, base: Work, rung: Rung, overrides: tuple[str, ...], drop: int) -> tuple[float, int, str]:
    """Step time, peak bytes, and a table row."""
    measured, _ = tunekit(setup, base, setup.folder / "rows", overrides)
    step, peak = statistics.median(measured["seconds"][drop:]), measured["peak"]
    text = f"| {rung.name} | {step:.2f} | {base.num_target_tokens / step:.0f} "
    text += f"| {peak / 2**30:.2f} | {measured['losses'][-1]:.4f} "
    text += f"| `{' '.join(rung.words)}` |\n"
    print(text, end="", flush=True)
    return step, peak, text


def padded(work: Work) -> tuple[str, ...]:
    """Overrides for the same number of documents, padded."""
    documents = work.batch * len(work.documents)
    return "data.packing=false", f"global_batch_size={documents}", f"micro_batch_size={documents}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="packed rows of 512 tokens a step")
    add_arguments(parser, steps=4)
    args = parser.parse_args()
    shape = replace(Shape(), layers=args.layers)
    work = Work("full", batch=args.batch, steps=args.steps, document_fractions=SHARES)
    head = "\n| | s a step | target tokens/s | peak GiB | last loss | words |\n|---|---|---|---|---|---|\n"
    text = f"# Trick by trick, {date.today()}\n\n"
    text += f"{describe_hardware(torch.device('cpu'))}, torch {torch.__version__}. A Llama of "
    text += f"{shape.layers} layers, dim {shape.dim}, vocabulary {shape.vocab:,}; {work.tokens:,} tokens a step in "
    text += f"documents of {', '.join(map(str, work.documents))}.\n"
    file = args.results / f"{date.today()}-ladder"
    results: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = RunSetup.from_args(args, folder)
        prepare(given.folder, shape, work)
        write_rows(given.folder / "rows", shape, work)
        text += "\n## Each on top of those before it\n" + head
        words, extra_options = FIRST.words, padded(work)
        for rung in (FIRST, *RUNGS):
            extra_options = () if rung.name == PACKED else extra_options
            words = (*(w for w in words if w.partition("=")[0] not in keys(rung)), *rung.words)
            step, peak, row = climb(given, work, rung, (*words, *extra_options), args.drop)
            results[rung.name], text = (work.num_target_tokens / step, peak / 2**30), text + row
            file.with_suffix(".md").write_text(text)
        steps(file.with_suffix(".png"), results)
        text += "\n## Each alone\n" + head
        for rung in (DEFAULT, *(rung for rung in RUNGS[2:])):
            words = (*(w for w in DEFAULT.words if w.partition("=")[0] not in keys(rung)), *rung.words)
            text += climb(given, work, rung, words, args.drop)[2]
            file.with_suffix(".md").write_text(text)


def keys(rung: Rung) -> set[str]:
    """Keys that a rung sets, including their parents."""
    return {word.partition("=")[0] for word in rung.words}


if __name__ == "__main__":
    main()
