"""Divergence of a student and a teacher on the CPU: milliseconds forward and backward, and the memory it wants.

python benchmarks/distillation.py [--sizes 1024x49152x576 ...] [--rounds 7]

From hidden states of both to the gradient of the student's. Heads are frozen, in bf16. Beside tunekit: what
trl's `GKDTrainer` does (logits of both as a whole, in fp32) and its `DistillationTrainer` (tiles). They run in turns.
Memory is what a process of its own grew by, weights and hidden states not counted.
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
from cross_entropy import BF16, CLEAR, resident
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from turns import turns

from tunekit.env_info import describe_hardware
from tunekit.kernels.kl_divergence import FullTargets, KLMixture, linear_kl_divergence, top_k_targets
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

KINDS = {"forward KL": (KLMixture(), 0.0), "Jensen-Shannon": (KLMixture(0.5, 0.5, 0.5, 0.5), 0.5)}


def head_of(vocab: int, dim: int) -> Head:
    """A frozen head whose logits spread by about one."""
    head = Head(DecoderSpec(vocab, dim, ())).to(BF16).requires_grad_(False)
    for part in head.weight.split(4096):
        part.normal_(std=dim**-0.5)
    return head


def works(tokens: int, vocab: int, dim: int) -> dict[str, Callable[[], float]]:
    """What is compared, by name: each gives the loss of a token."""
    torch.manual_seed(0)
    student, teacher = head_of(vocab, dim), head_of(vocab, dim)
    x, y = torch.randn(tokens, dim).to(BF16).requires_grad_(), torch.randn(tokens, dim).to(BF16)
    targets, rows = torch.randint(0, vocab, (tokens,)), torch.arange(tokens)

    def back(loss: Tensor) -> float:
        loss.backward()
        x.grad = None
        return loss.item()

    def ours(by: KLMixture, top: int | None = None) -> float:
        seen = FullTargets(y, teacher) if top is None else top_k_targets(y, teacher, rows, top, 1.0, vocab)
        return back(linear_kl_divergence(x, targets, student, seen, by)[0] / tokens)

    def whole(beta: float) -> float:
        with torch.no_grad():
            wanted = F.linear(y, teacher.weight).float()
        logits = F.linear(x, student.weight).float()
        return back(GKDTrainer.generalized_jsd_loss(logits[None], wanted[None], targets[None], beta=beta))

    def tiles(beta: float) -> float:
        heads, mask = (student.weight, teacher.weight), torch.ones(1, tokens, dtype=torch.bool)
        return back(_chunked_divergence_loss(x[None], y[None], *heads, mask, beta)[0])

    found: dict[str, Callable[[], float]] = {}
    for kind, (by, beta) in KINDS.items():
        found[f"tunekit, {kind}"] = lambda by=by: ours(by)
        found[f"trl, all logits, {kind}"] = lambda beta=beta: whole(beta)
        found[f"trl, tiles, {kind}"] = lambda beta=beta: tiles(beta)
    return found | {"tunekit, top 64, forward KL": lambda: ours(KLMixture(), 64)}


def grown(size: tuple[int, int, int], name: str) -> float:
    """MiB that a forward and a backward pass want at most. A small one has warmed up what is made once."""
    works(128, 512, size[2])[name]()
    work = works(*size)[name]
    CLEAR.write_text("5")  # the most is counted anew
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def table(words: str, rounds: int) -> None:
    """A row for each."""
    size = tuple(map(int, words.split("x")))
    assert len(size) == 3
    of = works(*size)
    losses = {name: work() for name, work in of.items()}
    taken = turns(of, rounds)
    print(f"\n| {words} | ms, median (least) | MiB | loss |\n|---|---|---|---|")
    for name, seconds in taken.items():
        line = [sys.executable, __file__, "--grown", name, "--sizes", words]
        told = subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()[-1]
        middle = f"{1e3 * statistics.median(seconds):,.0f} ({1e3 * min(seconds):,.0f})"
        print(f"| {name} | {middle} | {told} | {losses[name]:.6f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1024x49152x576"], help="tokens x vocabulary x dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--grown", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.grown:
        a, b, c = map(int, args.sizes[0].split("x"))
        print(f"{grown((a, b, c), args.grown):.0f}")
        return
    print(f"{describe_hardware(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"trl {trl.__version__}, Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}")  # fmt: skip
    for size in args.sizes:
        table(size, args.rounds)


if __name__ == "__main__":
    main()
