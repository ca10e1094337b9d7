"""Divergence of student and teacher on the CPU: time forward and backward, and memory.

    python benchmarks/distillation.py [--sizes 1024x49152x576 ...] [--rounds 7]

From the hidden states of both models to the gradient of the student's. Heads are frozen bf16. Also measures trl's
`GKDTrainer` (full logits in fp32) and `DistillationTrainer` (tiles). Implementations alternate. Memory is the
growth of a separate process, without weights and hidden states.
"""

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cross_entropy import BF16, build_head, parse_size
from interleave import measure_interleaved
from reporting import describe_environment, format_milliseconds
from resource_usage import measure_usage
from subprocesses import run_script
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from tunekit.kernels.kl_divergence import FullTargets, KLMixture, linear_kl_divergence, top_k_targets

# Mixture of tunekit, and beta of trl
DIVERGENCES = {"forward KL": (KLMixture(), 0.0), "Jensen-Shannon": (KLMixture(0.5, 0.5, 0.5, 0.5), 0.5)}


def build_workloads(num_tokens: int, vocab: int, dim: int) -> dict[str, Callable[[], float]]:
    """Implementations by name; each returns the loss per token."""
    torch.manual_seed(0)
    student, teacher = build_head(vocab, dim), build_head(vocab, dim)
    x = torch.randn(num_tokens, dim).to(BF16).requires_grad_()
    teacher_x = torch.randn(num_tokens, dim).to(BF16)
    targets, row_ids = torch.randint(0, vocab, (num_tokens,)), torch.arange(num_tokens)

    def run_backward(loss: Tensor) -> float:
        loss.backward()
        x.grad = None
        return loss.item()

    def run_tunekit(mixture: KLMixture, top_k: int | None = None) -> float:
        full = FullTargets(teacher_x, teacher)
        distribution = full if top_k is None else top_k_targets(teacher_x, teacher, row_ids, top_k, 1.0, vocab)
        return run_backward(linear_kl_divergence(x, targets, student, distribution, mixture)[0] / num_tokens)

    def run_gkd(beta: float) -> float:
        with torch.no_grad():
            teacher_logits = F.linear(teacher_x, teacher.weight).float()
        logits = F.linear(x, student.weight).float()
        loss = GKDTrainer.generalized_jsd_loss(logits[None], teacher_logits[None], targets[None], beta=beta)
        return run_backward(loss)

    def run_tiled(beta: float) -> float:
        heads, mask = (student.weight, teacher.weight), torch.ones(1, num_tokens, dtype=torch.bool)
        return run_backward(_chunked_divergence_loss(x[None], teacher_x[None], *heads, mask, beta)[0])

    workloads: dict[str, Callable[[], float]] = {}
    for name, (mixture, beta) in DIVERGENCES.items():
        workloads[f"tunekit, {name}"] = lambda mixture=mixture: run_tunekit(mixture)
        workloads[f"trl, all logits, {name}"] = lambda beta=beta: run_gkd(beta)
        workloads[f"trl, tiles, {name}"] = lambda beta=beta: run_tiled(beta)
    return workloads | {"tunekit, top 64, forward KL": lambda: run_tunekit(KLMixture(), 64)}


def measure_peak_growth(size: tuple[int, int, int], name: str) -> int:
    """Peak bytes of a forward and backward pass, after a small one that creates caches."""
    build_workloads(128, 512, size[2])[name]()
    return measure_usage(build_workloads(*size)[name]).peak_bytes


def print_table(size: str, rounds: int) -> None:
    workloads = build_workloads(*parse_size(size))
    losses = {name: workload() for name, workload in workloads.items()}
    times = measure_interleaved(workloads, rounds)
    print(f"\n| {size} | ms, median (minimum) | MiB | loss |\n|---|---|---|---|")
    for name, seconds in times.items():
        peak = run_script(__file__, "--child", name, "--sizes", size) / 2**20
        print(f"| {name} | {format_milliseconds(seconds, 0)} | {peak:.0f} | {losses[name]:.6f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1024x49152x576"], help="tokens x vocabulary x dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_peak_growth(parse_size(args.sizes[0]), args.child)))
        return
    print(describe_environment("trl"))
    for size in args.sizes:
        print_table(size, args.rounds)


if __name__ == "__main__":
    main()
