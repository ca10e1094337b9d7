"""Step time by number of tokens: one packed row of 512 to 8,192, LoRA of a Llama with 135M parameters.

    python benchmarks/scaling.py [--lengths 512 1024 2048 4096 8192] [--steps 5]

Each length is a `tune run sft`. Documents have 200 and 312 tokens, so longer rows contain more of them.
`--growing-documents` adds a line with two documents that grow with the row, for which attention is quadratic.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from datetime import date

import torch
from compare import run_tunekit_sft
from library_runs import RunSetup, add_arguments
from plots import plot_scaling
from reporting import CPU, fit_exponent
from training_inputs import LlamaShape, SFTTask, write_checkpoint, write_sft_data

from tunekit.env_info import describe_hardware

HEADER = """
| documents | tokens | step time, s | ms per token | peak GiB | all measured steps, s |
|---|---|---|---|---|---|
"""


def measure_task(setup: RunSetup, shape: LlamaShape, task: SFTTask, warmup_steps: int) -> tuple[list[float], int]:
    """Seconds of the measured steps, and peak bytes."""
    directory = setup.directory / f"{task.max_length}-{task.period}"
    write_sft_data(directory, shape, task)
    measurements, _ = run_tunekit_sft(setup, task, directory)
    return measurements["seconds"][warmup_steps:], measurements["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--growing-documents", action="store_true", help="also measure two documents per row")
    add_arguments(parser, steps=5)
    args = parser.parse_args()
    shape, base = replace(LlamaShape(), layers=args.layers), SFTTask(batch_size=1, steps=args.steps)
    periods: dict[str, int | None] = {"documents of 200 and 312": 512}
    periods |= {"two documents per row": None} if args.growing_documents else {}
    medians: dict[str, list[float]] = {name: [] for name in periods}
    text = f"# Step time by number of tokens, {date.today()}\n\n{describe_hardware(CPU)}, torch {torch.__version__}. "
    text += f"LoRA of rank 16 on all linear layers, one packed row per step, medians.\n{HEADER}"
    with tempfile.TemporaryDirectory() as directory:
        setup = RunSetup.from_args(args, directory)
        write_checkpoint(setup.directory, shape, base)
        for length in args.lengths:
            for name, period in periods.items():
                task = replace(base, max_length=length, period=period)
                seconds, peak = measure_task(setup, shape, task, args.warmup_steps)
                median = statistics.median(seconds)
                medians[name].append(median)
                text += f"| {name} | {length:,} | {median:.2f} | {1e3 * median / length:.2f} | {peak / 2**30:.2f} "
                text += f"| {' '.join(f'{s:.2f}' for s in seconds)} |\n"
                print(f"{length} {name}: {median:.2f} s", flush=True)
    exponents = {name: fit_exponent(args.lengths, times) for name, times in medians.items() if len(times) > 1}
    text += "".join(f"\n{name}: time grows with tokens^{exponent:.3f}.\n" for name, exponent in exponents.items())
    file = args.results / f"{date.today()}-scaling"
    file.with_suffix(".md").write_text(text)
    print(text)
    lines = {f"{name}: tokens^{exponent:.2f}": medians[name] for name, exponent in exponents.items()}
    first = next(iter(medians.values()))
    lines["proportional"] = [first[0] * length / args.lengths[0] for length in args.lengths]
    plot_scaling(file.with_suffix(".png"), args.lengths, "step time, s", lines)


if __name__ == "__main__":
    main()
