"""Time of the gated delta rule, forward and backward: chunked, token by token, and the torch path of transformers.

python benchmarks/gated_delta_rule.py [--threads 2] [--lengths 512 2048] [--rounds 3]
"""

import argparse
import time
from collections.abc import Callable

import torch
from interleave import Workload, measure_interleaved
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tunekit.kernels.gated_delta_rule import gated_delta_rule, normalize, recurrent

K_HEADS, V_HEADS, DIM = 16, 32, 128  # of Qwen3.5-9B
MAX_RECURRENT_LENGTH = 512


def run_recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    state = v.new_zeros(1, K_HEADS, V_HEADS // K_HEADS, DIM, DIM)
    grouped = (x.unflatten(2, (K_HEADS, -1)) for x in (v, decay, beta))
    return recurrent(normalize(q) * DIM**-0.5, normalize(k), *grouped, state)[0].flatten(2, 3)


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "tunekit": lambda *inputs: gated_delta_rule(*inputs)[0],
    "transformers": lambda *inputs: torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0],
    "token by token": run_recurrent,
}


def build_inputs(length: int) -> list[Tensor]:
    """Random q, k, v, decay and beta."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, length, K_HEADS, DIM)
    v, decay = torch.randn(1, length, V_HEADS, DIM), -2 * torch.rand(1, length, V_HEADS)
    return [x.requires_grad_() for x in (q, k, v, decay, torch.rand(1, length, V_HEADS))]


def build_workloads(length: int) -> dict[str, Workload]:
    """Forward and backward pass of each implementation."""
    inputs = build_inputs(length)
    return {
        name: lambda fn=fn: torch.autograd.grad(fn(*inputs).square().sum(), inputs)
        for name, fn in IMPLEMENTATIONS.items()
        if fn is not run_recurrent or length <= MAX_RECURRENT_LENGTH
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("Minimum CPU time of all cores:")
    for length in args.lengths:
        times = measure_interleaved(build_workloads(length), args.rounds, time.process_time, warmup=0)
        minima = (f"{name} {min(seconds):.2f} s" for name, seconds in times.items())
        print(f"{length} tokens: {', '.join(minima)}", flush=True)


if __name__ == "__main__":
    main()
