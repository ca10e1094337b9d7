"""How the time of a step grows with its tokens: one packed row of 512 to 8,192, LoRA of a Llama of 135M parameters.

python benchmarks/scaling.py [--lengths 512 1024 2048 4096 8192] [--steps 5]

Each length is a `tune run sft` of its own. Documents are of 200 and 312 tokens in every row, so a row holds more of
them and not longer ones; with `--grow` a second line has two documents that grow with the row, of which attention is
quadratic.
"""

import argparse
import math
import statistics
import tempfile
from dataclasses import replace
from datetime import date

import torch
from compare import tunekit
from contest import Given, options
from picture import line
from stage import Shape, Work, prepare, rows

from tunekit.env_info import describe_hardware


def exponent(tokens: list[int], seconds: list[float]) -> float:
    """The slope of the logarithms, by least squares."""
    x, y = ([math.log(v) for v in values] for values in (tokens, seconds))
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def measured(given: Given, shape: Shape, work: Work, drop: int) -> tuple[list[float], int]:
    """Seconds of the kept steps, and bytes at most."""
    folder = given.folder / f"{work.length}-{work.span}"
    rows(folder, shape, work)
    told, _ = tunekit(given, work, folder)
    return told["seconds"][drop:], told["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--grow", action="store_true", help="also documents that grow with the row")
    options(parser, steps=5)
    args = parser.parse_args()
    shape, base = replace(Shape(), layers=args.layers), Work(batch=1, steps=args.steps)
    names: dict[str, int | None] = {"documents of 200 and 312": 512}
    names |= {"two documents a row": None} if args.grow else {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    text = f"# Time of a step over its tokens, {date.today()}\n\n{describe_hardware(torch.device('cpu'))}, torch "
    text += f"{torch.__version__}. LoRA of rank 16 on all linear layers, one packed row a step, medians.\n\n"
    text += "| documents | tokens | s a step | ms a token | peak GiB | all kept steps |\n|---|---|---|---|---|---|\n"
    with tempfile.TemporaryDirectory() as folder:
        given = Given.of(args, folder)
        prepare(given.folder, shape, base)
        for length in args.lengths:
            for name, span in names.items():
                found, peak = measured(given, shape, replace(base, length=length, span=span), args.drop)
                middle = statistics.median(found)
                seconds[name].append(middle)
                text += f"| {name} | {length:,} | {middle:.2f} | {1e3 * middle / length:.2f} | {peak / 2**30:.2f} "
                text += f"| {' '.join(f'{s:.2f}' for s in found)} |\n"
                print(f"{length} {name}: {middle:.2f} s", flush=True)
    fits = {name: exponent(args.lengths, found) for name, found in seconds.items()}
    text += "".join(f"\nTime grows with tokens to the power {fit:.3f}: {name}.\n" for name, fit in fits.items())
    file = args.results / f"{date.today()}-scaling"
    file.with_suffix(".md").write_text(text)
    lines = {f"{name}: tokens^{fits[name]:.2f}": found for name, found in seconds.items()}
    first = next(iter(seconds.values()))
    lines["in proportion"] = [first[0] * length / args.lengths[0] for length in args.lengths]
    line(file.with_suffix(".png"), args.lengths, {"seconds a step": lines})
    print(text)


if __name__ == "__main__":
    main()
