"""Step time by number of tokens: one packed row of 512 to 8,192, LoRA of a Llama with 135M parameters.

    python benchmarks/scaling.py [--lengths 512 1024 2048 4096 8192] [--steps 5]

Each length is a `tune run sft`. Documents have 200 and 312 tokens, so longer rows contain more of them. `--grow`
adds a line with two documents that grow with the row, for which attention is quadratic.
"""

import argparse
import math
import statistics
import tempfile
from dataclasses import replace
from datetime import date

import torch
from compare import tunekit
from contest import RunSetup, add_arguments
from picture import line
from stage import Shape, Work, prepare, write_rows

from tunekit.env_info import describe_hardware


def exponent(tokens: list[int], seconds: list[float]) -> float:
    """Slope of the logarithms, by least squares."""
    x, y = ([math.log(v) for v in values] for values in (tokens, seconds))
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def measure(setup: RunSetup, shape: Shape, task: Work, drop: int) -> tuple[list[float], int]:
    """Seconds of the measured steps, and peak bytes."""
    folder = setup.folder / f"{task.length}-{task.span}"
    write_rows(folder, shape, task)
    result, _ = tunekit(setup, task, folder)
    return result["seconds"][drop:], result["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--grow", action="store_true", help="also documents that grow with the row")
    add_arguments(parser, steps=5)
    args = parser.parse_args()
    shape, base = replace(Shape(), layers=args.layers), Work(batch=1, steps=args.steps)
    names: dict[str, int | None] = {"documents of 200 and 312": 512}
    names |= {"two documents a row": None} if args.grow else {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    text = f"# Time of a step over its tokens, {date.today()}\n\n{describe_hardware(torch.device('cpu'))}, torch "
    text += f"{torch.__version__}. LoRA of rank 16 on all linear layers, one packed row a step, medians.\n\n"
    text += "| documents | tokens | s a step | ms a token | peak GiB | all kept steps |\n|---|---|---|---|---|---|\n"
    with tempfile.TemporaryDirectory() as folder:
        given = RunSetup.from_args(args, folder)
        prepare(given.folder, shape, base)
        for length in args.lengths:
            for name, span in names.items():
                times, peak = measure(given, shape, replace(base, length=length, span=span), args.drop)
                middle = statistics.median(times)
                seconds[name].append(middle)
                text += f"| {name} | {length:,} | {middle:.2f} | {1e3 * middle / length:.2f} | {peak / 2**30:.2f} "
                text += f"| {' '.join(f'{s:.2f}' for s in times)} |\n"
                print(f"{length} {name}: {middle:.2f} s", flush=True)
    fits = {name: exponent(args.lengths, times) for name, times in seconds.items()}
    text += "".join(f"\nTime grows with tokens to the power {fit:.3f}: {name}.\n" for name, fit in fits.items())
    file = args.results / f"{date.today()}-scaling"
    file.with_suffix(".md").write_text(text)
    lines = {f"{name}: tokens^{fits[name]:.2f}": times for name, times in seconds.items()}
    first = next(iter(seconds.values()))
    lines["in proportion"] = [first[0] * length / args.lengths[0] for length in args.lengths]
    line(file.with_suffix(".png"), args.lengths, {"seconds a step": lines})
    print(text)


if __name__ == "__main__":
    main()
