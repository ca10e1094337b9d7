"""LM head and loss on the CPU or a GPU: time of a forward and backward pass, and memory.

    python benchmarks/cross_entropy.py [time] [memory] [--sizes 2048x49152x576 ...] [--rounds 7] [--device cpu]

Matmuls are bf16. The head is frozen, or trained in fp32 where a line says so. Implementations alternate; the table
shows medians, with minima in brackets. Memory is the growth of a separate process, without weights.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from turns import turns

from tunekit.env_info import describe_hardware
from tunekit.kernels import cross_entropy
from tunekit.kernels.cross_entropy import CrossEntropyTerms, linear_cross_entropy, token_logps
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

BF16 = torch.bfloat16
SIZES = ("2048x49152x576", "1024x128256x576", "512x262144x576")
LEAN = ("tunekit", "tunekit, log-probabilities", "tunekit, no gradients", "tunekit, trained head")
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def make_workloads(tokens: int, vocab: int, dim: int, device: str) -> dict[str, Callable[[], object]]:
    """Implementations by name; the first are only the matmuls."""
    torch.manual_seed(0)
    shape = DecoderSpec(vocab, dim, ())
    head, trained = Head(shape).to(device, BF16).requires_grad_(False), Head(shape).to(device)
    for part in head.weight.split(4096):
        part.normal_(std=dim**-0.5)
    x = torch.randn(tokens, dim, device=device).to(BF16).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)

    def backward(loss: Tensor) -> None:
        loss.backward()
        x.grad = trained.weight.grad = None

    def without_gradient() -> None:
        with torch.no_grad():
            linear_cross_entropy(x, targets, head, CrossEntropyTerms())

    return {
        "products alone": matmuls_only(x.detach(), head.weight, False),
        "tunekit": lambda: backward(linear_cross_entropy(x, targets, head, CrossEntropyTerms())),
        "tunekit, log-probabilities": lambda: backward(token_logps(x, targets, head).mean()),
        "tunekit, no gradients": without_gradient,
        "chunks in plain torch": lambda: plain_chunks(x.detach(), targets, head.weight),
        "all logits, F.cross_entropy": lambda: backward(F.cross_entropy(F.linear(x, head.weight).float(), targets)),
        "products alone, trained head": matmuls_only(x.detach(), head.weight, True),
        "tunekit, trained head": lambda: backward(linear_cross_entropy(x, targets, trained, CrossEntropyTerms())),
        "all logits, F.cross_entropy, trained head": lambda: backward(
            F.cross_entropy(F.linear(x, trained.weight.to(BF16)).float(), targets)
        ),
    }


def matmuls_only(x: Tensor, weight: Tensor, trained: bool) -> Callable[[], object]:
    """The required matmuls, into an existing buffer, in the chunk size of tunekit."""
    size = cross_entropy.chunk_size(len(x), len(weight), x, trained)
    buffer, to_x, to_weight = x.new_zeros(size, len(weight)), torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        for part, back in zip(x.split(size), to_x.split(size), strict=True):
            logits = torch.mm(part, weight.T, out=buffer[: len(part)])
            torch.mm(logits, weight, out=back)
            if trained:
                torch.mm(logits.T, part, out=to_weight)

    return run


def plain_chunks(hidden: Tensor, targets: Tensor, weight: Tensor, size: int = 512) -> Tensor:
    """The same with autograd, one chunk of logits at a time."""
    grads = []
    for x, of in zip(hidden.split(size), targets.split(size), strict=True):
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(F.linear(x, weight).float(), of, reduction="sum")
        grads += torch.autograd.grad(loss, x)
    return torch.cat(grads)


def print_times(size: str, rounds: int, device: str) -> None:
    of = make_workloads(*map(int, size.split("x")), device)
    times = turns(of, rounds, synchronized_time if device == "cuda" else time.perf_counter)
    first = {name: "products alone" + ", trained head" * ("trained" in name) for name in of}
    print(f"\n| {size} | ms | times its products |\n|---|---|---|")
    for name, values in times.items():
        middle = statistics.median(values)
        ratio = middle / statistics.median(times[first[name]])
        print(f"| {name} | {1e3 * middle:.0f} ({1e3 * min(values):.0f}) | {ratio:.2f} |", flush=True)


def synchronized_time() -> float:
    """Time in seconds after the GPU has finished all queued work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def process_memory(key: str) -> float:
    """MiB that this process has (VmRSS), or had at its peak (VmHWM)."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def memory_growth(size: str, name: str, device: str) -> float:
    """Peak MiB of a forward and backward pass."""
    work = make_workloads(*map(int, size.split("x")), device)[name]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    CLEAR.write_text("5")  # reset VmHWM
    before = process_memory("VmRSS")
    work()
    return process_memory("VmHWM") - before


def print_memory(sizes: list[str], device: str) -> None:
    names = [*LEAN, "chunks in plain torch", "all logits, F.cross_entropy"]
    print(f"\n| MiB | {' | '.join(sizes)} |\n|---|{'---|' * len(sizes)}")
    for name in names:
        words = [sys.executable, __file__, "--device", device, "--grown", name, "--sizes"]
        outputs = [subprocess.run([*words, size], check=True, capture_output=True, text=True).stdout for size in sizes]
        print(f"| {name} | {' | '.join(output.strip() for output in outputs)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["time", "memory"])
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], help="tokens x vocabulary x dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--grown", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.grown:
        print(f"{memory_growth(args.sizes[0], args.grown, args.device):.0f}")
        return
    print(
        f"{describe_hardware(torch.device(args.device))}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, "
        f"Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}"
    )
    for size in args.sizes if "time" in args.what else []:
        print_times(size, args.rounds, args.device)
    if "memory" in args.what:
        print_memory(args.sizes, args.device)


if __name__ == "__main__":
    main()
