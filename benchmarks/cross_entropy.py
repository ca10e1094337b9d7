"""Head and loss on the CPU or a GPU: milliseconds of a forward and backward pass, and the memory it wants.

python benchmarks/cross_entropy.py [time] [memory] [--sizes 2048x49152x576 ...] [--rounds 7] [--device cpu]

Products are bf16, the head is frozen, or trained in fp32 where a line says so. Those that are compared run in turns;
medians are told, and the least in brackets. Memory is what a process of its own grew by, weights not counted.
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


def works(tokens: int, vocab: int, dim: int, device: str) -> dict[str, Callable[[], object]]:
    """What is compared, by name: first the products alone."""
    torch.manual_seed(0)
    shape = DecoderSpec(vocab, dim, ())
    head, trained = Head(shape).to(device, BF16).requires_grad_(False), Head(shape).to(device)
    for part in head.weight.split(4096):
        part.normal_(std=dim**-0.5)
    x = torch.randn(tokens, dim, device=device).to(BF16).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)

    def back(loss: Tensor) -> None:
        loss.backward()
        x.grad = trained.weight.grad = None

    def quiet() -> None:
        with torch.no_grad():
            linear_cross_entropy(x, targets, head, CrossEntropyTerms())

    return {
        "products alone": products(x.detach(), head.weight, False),
        "tunekit": lambda: back(linear_cross_entropy(x, targets, head, CrossEntropyTerms())),
        "tunekit, log-probabilities": lambda: back(token_logps(x, targets, head).mean()),
        "tunekit, no gradients": quiet,
        "chunks in plain torch": lambda: plain_chunks(x.detach(), targets, head.weight),
        "all logits, F.cross_entropy": lambda: back(F.cross_entropy(F.linear(x, head.weight).float(), targets)),
        "products alone, trained head": products(x.detach(), head.weight, True),
        "tunekit, trained head": lambda: back(linear_cross_entropy(x, targets, trained, CrossEntropyTerms())),
        "all logits, F.cross_entropy, trained head": lambda: back(
            F.cross_entropy(F.linear(x, trained.weight.to(BF16)).float(), targets)
        ),
    }


def products(x: Tensor, weight: Tensor, trained: bool) -> Callable[[], object]:
    """The products that nobody can leave out, into memory that is there, in chunks of the size that tunekit takes."""
    size = cross_entropy.chunk(len(x), len(weight), x, trained)
    room, to_x, to_weight = x.new_zeros(size, len(weight)), torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        for part, back in zip(x.split(size), to_x.split(size), strict=True):
            logits = torch.mm(part, weight.T, out=room[: len(part)])
            torch.mm(logits, weight, out=back)
            if trained:
                torch.mm(logits.T, part, out=to_weight)

    return run


def plain_chunks(hidden: Tensor, targets: Tensor, weight: Tensor, size: int = 512) -> Tensor:
    """The same by autograd, and no more than a chunk's logits at a time."""
    grads = []
    for x, of in zip(hidden.split(size), targets.split(size), strict=True):
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(F.linear(x, weight).float(), of, reduction="sum")
        grads += torch.autograd.grad(loss, x)
    return torch.cat(grads)


def timed(size: str, rounds: int, device: str) -> None:
    of = works(*map(int, size.split("x")), device)
    found = turns(of, rounds, waited if device == "cuda" else time.perf_counter)
    first = {name: "products alone" + ", trained head" * ("trained" in name) for name in of}
    print(f"\n| {size} | ms | times its products |\n|---|---|---|")
    for name, taken in found.items():
        middle = statistics.median(taken)
        ratio = middle / statistics.median(found[first[name]])
        print(f"| {name} | {1e3 * middle:.0f} ({1e3 * min(taken):.0f}) | {ratio:.2f} |", flush=True)


def waited() -> float:
    """Seconds, when the GPU has done all it was told."""
    torch.cuda.synchronize()
    return time.perf_counter()


def resident(key: str) -> float:
    """MiB that this process has (VmRSS), or had at most (VmHWM)."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def grown(size: str, name: str, device: str) -> float:
    """MiB that a forward and a backward pass want at most."""
    work = works(*map(int, size.split("x")), device)[name]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    CLEAR.write_text("5")  # the most is counted anew
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def memory(sizes: list[str], device: str) -> None:
    names = [*LEAN, "chunks in plain torch", "all logits, F.cross_entropy"]
    print(f"\n| MiB | {' | '.join(sizes)} |\n|---|{'---|' * len(sizes)}")
    for name in names:
        words = [sys.executable, __file__, "--device", device, "--grown", name, "--sizes"]
        told = [subprocess.run([*words, size], check=True, capture_output=True, text=True).stdout for size in sizes]
        print(f"| {name} | {' | '.join(one.strip() for one in told)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["time", "memory"])
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], help="tokens x vocabulary x dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--grown", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.grown:
        print(f"{grown(args.sizes[0], args.grown, args.device):.0f}")
        return
    print(
        f"{describe_hardware(torch.device(args.device))}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, "
        f"Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}"
    )
    for size in args.sizes if "time" in args.what else []:
        timed(size, args.rounds, args.device)
    if "memory" in args.what:
        memory(args.sizes, args.device)


if __name__ == "__main__":
    main()
