"""LM head and loss on the CPU or a GPU: time of a forward and backward pass, and memory.

    python benchmarks/cross_entropy.py [time] [memory] [--sizes 2048x49152x576 ...] [--rounds 7] [--device cpu]

Matmuls are bf16. The head is frozen, or trained in fp32 where a row says so. Implementations alternate; the table
shows medians, with minima in parentheses. Memory is the growth of a separate process, without weights.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleave import Workload, measure_interleaved
from reporting import describe_environment, format_milliseconds
from resource_usage import measure_usage
from subprocesses import run_script
from torch import Tensor

from tunekit.kernels import cross_entropy
from tunekit.kernels.cross_entropy import CrossEntropyTerms, linear_cross_entropy, token_logps
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

BF16 = torch.bfloat16
SIZES = ("2048x49152x576", "1024x128256x576", "512x262144x576")
MATMULS, MATMULS_TRAINED = "matmuls only", "matmuls only, trained head"
CHUNKED, FULL_LOGITS = "plain torch, logits in chunks", "F.cross_entropy of all logits"
MEMORY_ROWS = ("tunekit", "tunekit, logps", "tunekit, no gradients", "tunekit, trained head", CHUNKED, FULL_LOGITS)


def build_head(vocab: int, dim: int, device: str = "cpu") -> Head:
    """Frozen bf16 head whose logits have a standard deviation of about 1."""
    head = Head(DecoderSpec(vocab, dim, ())).to(device, BF16).requires_grad_(False)
    for rows in head.weight.split(4096):
        rows.normal_(std=dim**-0.5)
    return head


def build_workloads(num_tokens: int, vocab: int, dim: int, device: str) -> dict[str, Workload]:
    """Implementations by name."""
    torch.manual_seed(0)
    head, trained_head = build_head(vocab, dim, device), Head(DecoderSpec(vocab, dim, ())).to(device)
    x = torch.randn(num_tokens, dim, device=device).to(BF16).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), device=device)
    terms = CrossEntropyTerms()

    def run_backward(loss: Tensor) -> None:
        loss.backward()
        x.grad = trained_head.weight.grad = None

    def run_without_gradients() -> None:
        with torch.no_grad():
            linear_cross_entropy(x, targets, head, terms)

    return {
        MATMULS: build_matmuls(x.detach(), head.weight, False),
        "tunekit": lambda: run_backward(linear_cross_entropy(x, targets, head, terms)),
        "tunekit, logps": lambda: run_backward(token_logps(x, targets, head).mean()),
        "tunekit, no gradients": run_without_gradients,
        CHUNKED: lambda: compute_chunked_gradient(x.detach(), targets, head.weight),
        FULL_LOGITS: lambda: run_backward(F.cross_entropy(F.linear(x, head.weight).float(), targets)),
        MATMULS_TRAINED: build_matmuls(x.detach(), head.weight, True),
        "tunekit, trained head": lambda: run_backward(linear_cross_entropy(x, targets, trained_head, terms)),
        f"{FULL_LOGITS}, trained head": lambda: run_backward(
            F.cross_entropy(F.linear(x, trained_head.weight.to(BF16)).float(), targets)
        ),
    }


def build_matmuls(x: Tensor, weight: Tensor, trained: bool) -> Workload:
    """The required matmuls, into an existing buffer, in the chunk size of tunekit."""
    chunk_size = cross_entropy.chunk_size(len(x), len(weight), x, trained)
    buffer, x_grad, weight_grad = x.new_zeros(chunk_size, len(weight)), torch.empty_like(x), torch.empty_like(weight)

    def run_matmuls() -> None:
        for rows, rows_grad in zip(x.split(chunk_size), x_grad.split(chunk_size), strict=True):
            logits = torch.mm(rows, weight.T, out=buffer[: len(rows)])
            torch.mm(logits, weight, out=rows_grad)
            if trained:
                torch.mm(logits.T, rows, out=weight_grad)

    return run_matmuls


def compute_chunked_gradient(hidden: Tensor, targets: Tensor, weight: Tensor, chunk_size: int = 512) -> Tensor:
    """Gradient of the hidden states with autograd, one chunk of logits at a time."""
    grads = []
    for x, chunk_targets in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(F.linear(x, weight).float(), chunk_targets, reduction="sum")
        grads += torch.autograd.grad(loss, x)
    return torch.cat(grads)


def parse_size(text: str) -> tuple[int, int, int]:
    """Tokens, vocabulary size and dim of "2048x49152x576"."""
    num_tokens, vocab, dim = map(int, text.split("x"))
    return num_tokens, vocab, dim


def print_times(size: str, rounds: int, device: str) -> None:
    workloads = build_workloads(*parse_size(size), device)
    times = measure_interleaved(workloads, rounds, read_synchronized_time if device == "cuda" else time.perf_counter)
    print(f"\n| {size} | ms | time relative to its matmuls |\n|---|---|---|")
    for name, seconds in times.items():
        baseline = times[MATMULS_TRAINED if "trained" in name else MATMULS]
        ratio = statistics.median(seconds) / statistics.median(baseline)
        print(f"| {name} | {format_milliseconds(seconds, 0)} | {ratio:.2f} |", flush=True)


def read_synchronized_time() -> float:
    """Time in seconds after the GPU has finished all queued work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_peak_growth(workload: Callable[[], object], device: str) -> int:
    """Peak bytes of a forward and backward pass in addition to the bytes before it."""
    if device != "cuda":
        return measure_usage(workload).peak_bytes
    torch.cuda.reset_peak_memory_stats()
    initial_bytes = torch.cuda.memory_allocated()
    workload()
    return torch.cuda.max_memory_allocated() - initial_bytes


def print_memory(sizes: list[str], device: str) -> None:
    print(f"\n| MiB | {' | '.join(sizes)} |\n|---|{'---|' * len(sizes)}")
    for name in MEMORY_ROWS:
        peaks = [run_script(__file__, "--device", device, "--child", name, "--sizes", size) for size in sizes]
        print(f"| {name} | {' | '.join(f'{peak / 2**20:.0f}' for peak in peaks)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="*", default=["time", "memory"])
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], help="tokens x vocabulary x dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        workload = build_workloads(*parse_size(args.sizes[0]), args.device)[args.child]
        print(json.dumps(measure_peak_growth(workload, args.device)))
        return
    print(describe_environment(device=torch.device(args.device)))
    for size in args.sizes if "time" in args.metrics else []:
        print_times(size, args.rounds, args.device)
    if "memory" in args.metrics:
        print_memory(args.sizes, args.device)


if __name__ == "__main__":
    main()
