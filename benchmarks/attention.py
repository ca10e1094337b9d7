"""Attention compared with torch's: packed documents and one long document, forward and backward, 512 to 8,192
tokens.

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
from tunekit.kernels.attention import AttentionParams, attention, attention_per_document
from tunekit.kernels.sequence_layout import SequenceLayout

DOCUMENTS = 200, 312  # tokens, alternating
HEADS, KV_HEADS, DIM = 9, 3, 64
RULE = AttentionParams(DIM**-0.5)
DENSE = 4096  # rows up to this length are also measured with a dense mask
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def tunekit_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    return attention(q, k, v, RULE, SequenceLayout(offsets))


def per_document_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """torch, one document at a time."""
    return attention_per_document(q, k, v, RULE, offsets, None)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """torch, with a dense mask."""
    document = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    mask = (document[:, None] == document).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=RULE.scale, enable_gqa=True).transpose(1, 2)


def make_cu_seqlens(tokens: int, single_document: bool) -> Tensor:
    if single_document:
        return torch.tensor([0, tokens])
    return torch.tensor([0, *(DOCUMENTS * (tokens // sum(DOCUMENTS)))]).cumsum(0)


def seconds(
    forms: dict[str, Form], tokens: int, single_document: bool, dtype: torch.dtype, rounds: int
) -> dict[str, Tensor]:
    """Median seconds of forward and backward (2,); the implementations alternate."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs, grad, offsets = (
        [x.requires_grad_() for x in (q, k, v)],
        torch.randn_like(q),
        make_cu_seqlens(tokens, single_document),
    )
    times: dict[str, list[list[float]]] = {name: [] for name in forms}
    for turn in range(rounds + 1):
        for name, form in forms.items():
            begin = time.perf_counter()
            y = form(q, k, v, offsets)
            middle = time.perf_counter()
            torch.autograd.grad(y, inputs, grad)
            if turn:  # the first round compiles and allocates
                times[name].append([middle - begin, time.perf_counter() - middle])
    return {
        name: torch.tensor([statistics.median(x) for x in zip(*times, strict=True)]) for name, times in times.items()
    }


def exponent(tokens: list[int], times: list[float]) -> float:
    """Exponent of time as a power of the number of tokens, from a linear fit of the logarithms."""
    x, y = (torch.tensor([math.log(n) for n in numbers], dtype=torch.float64) for numbers in (tokens, times))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def table(title: str, single_document: bool, dtype: torch.dtype, lengths: list[int], rounds: int) -> None:
    print(f"\n## {title}\n\n| Tokens | ours | torch, by document | torch, dense mask | ours, GFLOP/s |")
    print("|---|---|---|---|---|")
    totals = []
    for tokens in lengths:
        forms: dict[str, Form] = {"ours": tunekit_attention, "each": per_document_attention}
        if not single_document and tokens <= DENSE:
            forms["dense"] = dense_attention
        medians = seconds(forms, tokens, single_document, dtype, rounds)
        totals.append(float(medians["ours"].sum()))
        pairs = float(
            (
                make_cu_seqlens(tokens, single_document).diff().double()
                * (make_cu_seqlens(tokens, single_document).diff() + 1)
                / 2
            ).sum()
        )
        rate = 14 * pairs * HEADS * DIM / totals[-1] / 1e9  # two matmuls forward, five backward
        cells = [
            " + ".join(f"{1e3 * x:.2f}" for x in medians[name]) if name in medians else ""
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
