"""Divergence of student and teacher on the CPU: time forward and backward, and memory.

    python benchmarks/distillation.py [--sizes 1024x49152x576 ...] [--rounds 7]

From the hidden states of both models to the gradient of the student's. Heads are frozen bf16. Also measures trl's
`GKDTrainer` (full logits in fp32) and `DistillationTrainer` (tiles). Implementations alternate. Memory is the
growth of a separate process, without weights and hidden states.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
import trl
from cross_entropy import BF16, CLEAR, process_memory
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from turns import turns

from tunekit.env_info import describe_hardware
from tunekit.kernels.kl_divergence import FullTargets, KLMixture, linear_kl_divergence, top_k_targets
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

KINDS = {"forward KL": (KLMixture(), 0.0), "Jensen-Shannon": (KLMixture(0.5, 0.5, 0.5, 0.5), 0.5)}


def make_head(vocab: int, dim: int) -> Head:
    """Frozen head whose logits have a standard deviation of about one."""
    head = Head(DecoderSpec(vocab, dim, ())).to(BF16).requires_grad_(False)
    for part in head.weight.split(4096):
        part.normal_(std=dim**-0.5)
    return head


def make_workloads(tokens: int, vocab: int, dim: int) -> dict[str, Callable[[], float]]:
    """Implementations by name; each returns the loss per token."""
    torch.manual_seed(0)
    student, teacher = make_head(vocab, dim), make_head(vocab, dim)
    x, y = torch.randn(tokens, dim).to(BF16).requires_grad_(), torch.randn(tokens, dim).to(BF16)
    targets, rows = torch.randint(0, vocab, (tokens,)), torch.arange(tokens)

    def backward(loss: Tensor) -> float:
        loss.backward()
        x.grad = None
        return loss.item()

    def ours(by: KLMixture, top: int | None = None) -> float:
        seen = FullTargets(y, teacher) if top is None else top_k_targets(y, teacher, rows, top, 1.0, vocab)
        return backward(linear_kl_divergence(x, targets, student, seen, by)[0] / tokens)

    def full_logits(beta: float) -> float:
        with torch.no_grad():
            teacher_logits = F.linear(y, teacher.weight).float()
        logits = F.linear(x, student.weight).float()
        return backward(GKDTrainer.generalized_jsd_loss(logits[None], teacher_logits[None], targets[None], beta=beta))

    def tiled(beta: float) -> float:
        heads, mask = (student.weight, teacher.weight), torch.ones(1, tokens, dtype=torch.bool)
        return backward(_chunked_divergence_loss(x[None], y[None], *heads, mask, beta)[0])

    workloads: dict[str, Callable[[], float]] = {}
    for kind, (by, beta) in KINDS.items():
        workloads[f"tunekit, {kind}"] = lambda by=by: ours(by)
        workloads[f"trl, all logits, {kind}"] = lambda beta=beta: full_logits(beta)
        workloads[f"trl, tiles, {kind}"] = lambda beta=beta: tiled(beta)
    return workloads | {"tunekit, top 64, forward KL": lambda: ours(KLMixture(), 64)}


def memory_growth(size: tuple[int, int, int], name: str) -> float:
    """Peak MiB of a forward and backward pass, after a small one that creates caches."""
    make_workloads(128, 512, size[2])[name]()
    work = make_workloads(*size)[name]
    CLEAR.write_text("5")  # reset VmHWM
    before = process_memory("VmRSS")
    work()
    return process_memory("VmHWM") - before


def table(words: str, rounds: int) -> None:
    """A row per implementation."""
    size = tuple(map(int, words.split("x")))
    assert len(size) == 3
    of = make_workloads(*size)
    losses = {name: work() for name, work in of.items()}
    times = turns(of, rounds)
    print(f"\n| {words} | ms, median (least) | MiB | loss |\n|---|---|---|---|")
    for name, seconds in times.items():
        line = [sys.executable, __file__, "--grown", name, "--sizes", words]
        output = subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()[-1]
        middle = f"{1e3 * statistics.median(seconds):,.0f} ({1e3 * min(seconds):,.0f})"
        print(f"| {name} | {middle} | {output} | {losses[name]:.6f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1024x49152x576"], help="tokens x vocabulary x dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--grown", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.grown:
        a, b, c = map(int, args.sizes[0].split("x"))
        print(f"{memory_growth((a, b, c), args.grown):.0f}")
        return
    print(f"{describe_hardware(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"trl {trl.__version__}, Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}")  # fmt: skip
    for size in args.sizes:
        table(size, args.rounds)


if __name__ == "__main__":
    main()
