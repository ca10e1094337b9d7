"""Attention beside torch's own: packed documents and one long document, forward and backward, from 512 to 8,192 tokens.

python benchmarks/attention.py > table.md
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.env_info import describe_hardware
from tunekit.kernels.attention import AttentionParams, attention, chunked, packed
from tunekit.kernels.sequence_layout import SequenceLayout

DOCUMENTS = 200, 312  # tokens, in turns
HEADS, KV_HEADS, DIM = 9, 3, 64
RULE = AttentionParams(DIM**-0.5)
DENSE = 4096  # tokens of the longest row for which a mask of all pairs is made
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    return attention(q, k, v, RULE, SequenceLayout(offsets))


def each(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """torch, a document at a time."""
    return packed(q, k, v, RULE, offsets, None) if len(offsets) > 2 else chunked(q, k, v, RULE, None)


def dense(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """torch, with a mask of all pairs."""
    document = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    mask = (document[:, None] == document).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=RULE.scale, enable_gqa=True).transpose(1, 2)


def bounds(tokens: int, whole: bool) -> Tensor:
    if whole:
        return torch.tensor([0, tokens])
    return torch.tensor([0, *(DOCUMENTS * (tokens // sum(DOCUMENTS)))]).cumsum(0)


def seconds(forms: dict[str, Form], tokens: int, whole: bool, dtype: torch.dtype, rounds: int) -> dict[str, Tensor]:
    """Medians of forward and backward (2,), the forms in turns."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs, grad, offsets = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q), bounds(tokens, whole)
    taken: dict[str, list[list[float]]] = {name: [] for name in forms}
    for turn in range(rounds + 1):
        for name, form in forms.items():
            begin = time.perf_counter()
            y = form(q, k, v, offsets)
            middle = time.perf_counter()
            torch.autograd.grad(y, inputs, grad)
            if turn:  # the first one compiles, and meets new memory
                taken[name].append([middle - begin, time.perf_counter() - middle])
    return {
        name: torch.tensor([statistics.median(x) for x in zip(*times, strict=True)]) for name, times in taken.items()
    }


def exponent(tokens: list[int], times: list[float]) -> float:
    """Of time as a power of tokens: the slope of a straight line through the logarithms."""
    x, y = (torch.tensor([math.log(n) for n in numbers], dtype=torch.float64) for numbers in (tokens, times))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def table(title: str, whole: bool, dtype: torch.dtype, lengths: list[int], rounds: int) -> None:
    print(f"\n## {title}\n\n| Tokens | ours | torch, by document | torch, dense mask | ours, GFLOP/s |")
    print("|---|---|---|---|---|")
    totals = []
    for tokens in lengths:
        forms: dict[str, Form] = {"ours": ours, "each": each}
        if not whole and tokens <= DENSE:
            forms["dense"] = dense
        found = seconds(forms, tokens, whole, dtype, rounds)
        totals.append(float(found["ours"].sum()))
        pairs = float((bounds(tokens, whole).diff().double() * (bounds(tokens, whole).diff() + 1) / 2).sum())
        rate = 14 * pairs * HEADS * DIM / totals[-1] / 1e9  # two products forward, five backward
        cells = [
            " + ".join(f"{1e3 * x:.2f}" for x in found[name]) if name in found else ""
            for name in ("ours", "each", "dense")
        ]
        print(f"| {tokens:,} | {' | '.join(cells)} | {rate:.0f} |", flush=True)
    print(f"\nTime grows with tokens to the power of {exponent(lengths, totals):.2f}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    args = parser.parse_args()
    machine = describe_hardware(torch.device("cpu"))
    print(f"# Attention on the CPU\n\n{machine}; {torch.get_num_threads()} threads, torch {torch.__version__}.")
    print(f"{HEADS}/{KV_HEADS} heads of {DIM}. Median milliseconds of forward + backward, in turns.")
    table("bf16, documents of 200 and 312 tokens", False, torch.bfloat16, args.lengths, args.rounds)
    table("fp32, documents of 200 and 312 tokens", False, torch.float32, args.lengths[:3], args.rounds)
    table("bf16, one document", True, torch.bfloat16, args.lengths, min(args.rounds, 3))


if __name__ == "__main__":
    main()
