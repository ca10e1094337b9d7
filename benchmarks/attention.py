"""Attention on the CPU compared with SDPA of torch, forward and backward: packed documents and one long document, 512
to 8,192 tokens.

    python benchmarks/attention.py > table.md
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from reporting import describe_environment, fit_exponent
from torch import Tensor

from tunekit.kernels.attention import AttentionParams, attention, attention_per_document
from tunekit.kernels.sequence_layout import SequenceLayout

DOCUMENT_LENGTHS = 200, 312  # alternating
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
PARAMS = AttentionParams(HEAD_DIM**-0.5)
MAX_DENSE_TOKENS = 4096  # of rows that are also measured with a dense mask
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def run_tunekit(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return attention(q, k, v, PARAMS, SequenceLayout(cu_seqlens))


def run_sdpa_per_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return attention_per_document(q, k, v, PARAMS, cu_seqlens, None)


def run_sdpa_with_dense_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    document_ids = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    mask = (document_ids[:, None] == document_ids).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=PARAMS.scale, enable_gqa=True).transpose(1, 2)


FUNCTIONS: dict[str, AttentionFunction] = {
    "tunekit": run_tunekit,
    "torch, per document": run_sdpa_per_document,
    "torch, dense mask": run_sdpa_with_dense_mask,
}


def build_cu_seqlens(num_tokens: int, single_document: bool) -> Tensor:
    if single_document:
        return torch.tensor([0, num_tokens])
    return torch.tensor([0, *(DOCUMENT_LENGTHS * (num_tokens // sum(DOCUMENT_LENGTHS)))]).cumsum(0)


def measure_passes(
    functions: dict[str, AttentionFunction], cu_seqlens: Tensor, dtype: torch.dtype, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of the forward and of the backward pass; the implementations alternate."""
    torch.manual_seed(0)
    num_tokens = int(cu_seqlens[-1])
    q, k, v = (torch.randn(1, num_tokens, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs, grad = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    forward: dict[str, list[float]] = {name: [] for name in functions}
    backward: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            y = function(q, k, v, cu_seqlens)
            forward_end = time.perf_counter()
            torch.autograd.grad(y, inputs, grad)
            if i:  # the first round compiles and allocates
                forward[name].append(forward_end - start)
                backward[name].append(time.perf_counter() - forward_end)
    return {name: (statistics.median(forward[name]), statistics.median(backward[name])) for name in functions}


def count_flops(cu_seqlens: Tensor) -> float:
    """FLOPs of causal attention within documents: two matmuls forward, five backward."""
    lengths = cu_seqlens.diff().double()
    return 14 * float((lengths * (lengths + 1) / 2).sum()) * HEADS * HEAD_DIM


def print_table(title: str, single_document: bool, dtype: torch.dtype, lengths: list[int], rounds: int) -> None:
    print(f"\n## {title}\n\n| Tokens | {' | '.join(FUNCTIONS)} | tunekit, GFLOP/s |\n|---|---|---|---|---|")
    tunekit_seconds = []
    for num_tokens in lengths:
        functions, cu_seqlens = dict(FUNCTIONS), build_cu_seqlens(num_tokens, single_document)
        if single_document or num_tokens > MAX_DENSE_TOKENS:
            del functions["torch, dense mask"]
        medians = measure_passes(functions, cu_seqlens, dtype, rounds)
        tunekit_seconds.append(sum(medians["tunekit"]))
        rate = count_flops(cu_seqlens) / tunekit_seconds[-1] / 1e9
        cells = [" + ".join(f"{1e3 * s:.2f}" for s in medians.get(name, ())) for name in FUNCTIONS]
        print(f"| {num_tokens:,} | {' | '.join(cells)} | {rate:.0f} |", flush=True)
    if len(lengths) > 1:
        print(f"\ntunekit: time grows with tokens^{fit_exponent(lengths, tunekit_seconds):.2f}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    args = parser.parse_args()
    print(f"# Attention on the CPU\n\n{describe_environment()}.\n{HEADS} heads, {KV_HEADS} KV heads, head_dim "
          f"{HEAD_DIM}. Median milliseconds, forward + backward; implementations alternate.")  # fmt: skip
    print_table("bf16, documents of 200 and 312 tokens", False, torch.bfloat16, args.lengths, args.rounds)
    print_table("fp32, documents of 200 and 312 tokens", False, torch.float32, args.lengths[:3], args.rounds)
    print_table("bf16, one document", True, torch.bfloat16, args.lengths, min(args.rounds, 3))


if __name__ == "__main__":
    main()
