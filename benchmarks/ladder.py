"""Speed and memory of fine-tuning, trick by trick: each on top of those before it, then each alone.

python benchmarks/ladder.py [--batch 4] [--steps 4]

A rung is what one adds to the command line of `tune run sft`. The ladder begins as a first script would: all weights,
all in fp32, documents of very different lengths in rows of their own that are padded to the longest.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass, replace
from datetime import date

import torch
from compare import tunekit
from contest import Given, options
from picture import steps
from stage import Shape, Work, prepare, rows

from tunekit.env_info import describe_hardware

SHARES = (40 / 512, 120 / 512, 352 / 512)  # of a row, its documents: padded, they take twice the room


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


def climb(given: Given, base: Work, rung: Rung, words: tuple[str, ...], drop: int) -> tuple[float, int, str]:
    """Seconds of a step, bytes at most, and a row of the table."""
    told, _ = tunekit(given, base, given.folder / "rows", words)
    step, peak = statistics.median(told["seconds"][drop:]), told["peak"]
    text = f"| {rung.name} | {step:.2f} | {base.learnt / step:.0f} | {peak / 2**30:.2f} | {told['losses'][-1]:.4f} "
    text += f"| `{' '.join(rung.words)}` |\n"
    print(text, end="", flush=True)
    return step, peak, text


def padded(work: Work) -> tuple[str, ...]:
    """As many documents in rows of their own."""
    documents = work.batch * len(work.documents)
    return "data.packing=false", f"global_batch_size={documents}", f"micro_batch_size={documents}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="packed rows of 512 tokens a step")
    options(parser, steps=4)
    args = parser.parse_args()
    shape = replace(Shape(), layers=args.layers)
    work = Work("full", batch=args.batch, steps=args.steps, shares=SHARES)
    head = "\n| | s a step | learnt tokens/s | peak GiB | last loss | words |\n|---|---|---|---|---|---|\n"
    text = f"# Trick by trick, {date.today()}\n\n"
    text += f"{describe_hardware(torch.device('cpu'))}, torch {torch.__version__}. A Llama of "
    text += f"{shape.layers} layers, dim {shape.dim}, vocabulary {shape.vocab:,}; {work.tokens:,} tokens a step in "
    text += f"documents of {', '.join(map(str, work.documents))}.\n"
    file = args.results / f"{date.today()}-ladder"
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = Given.of(args, folder)
        prepare(given.folder, shape, work)
        rows(given.folder / "rows", shape, work)
        text += "\n## Each on top of those before it\n" + head
        words, room = FIRST.words, padded(work)
        for rung in (FIRST, *RUNGS):
            room = () if rung.name == PACKED else room
            words = (*(w for w in words if w.partition("=")[0] not in keys(rung)), *rung.words)
            step, peak, row = climb(given, work, rung, (*words, *room), args.drop)
            found[rung.name], text = (work.learnt / step, peak / 2**30), text + row
            file.with_suffix(".md").write_text(text)
        steps(file.with_suffix(".png"), found)
        text += "\n## Each alone\n" + head
        for rung in (DEFAULT, *(rung for rung in RUNGS[2:])):
            words = (*(w for w in DEFAULT.words if w.partition("=")[0] not in keys(rung)), *rung.words)
            text += climb(given, work, rung, words, args.drop)[2]
            file.with_suffix(".md").write_text(text)


def keys(rung: Rung) -> set[str]:
    """What a rung says, with what hangs below it."""
    return {word.partition("=")[0] for word in rung.words}


if __name__ == "__main__":
    main()
