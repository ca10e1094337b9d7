"""Time of the gated delta rule, forward and backward: chunked, token by token, and the torch path of transformers.

python benchmarks/delta.py [--threads 2] [--lengths 512 2048] [--rounds 3]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tunekit.kernels.gated_delta_rule import gated_delta_rule, normalize, recurrent

K_HEADS, V_HEADS, DIM = 16, 32, 128  # of Qwen3.5-9B


def tokenwise(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    state = v.new_zeros(1, K_HEADS, V_HEADS // K_HEADS, DIM, DIM)
    split = (x.unflatten(2, (K_HEADS, -1)) for x in (v, decay, beta))
    return recurrent(normalize(q) * DIM**-0.5, normalize(k), *split, state)[0].flatten(2, 3)


ROUTES: dict[str, Callable[..., Tensor]] = {
    "tunekit": lambda *inputs: gated_delta_rule(*inputs)[0],
    "transformers": lambda *inputs: torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0],
    "token by token": tokenwise,
}


def inputs(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, length, K_HEADS, DIM)
    v, decay = torch.randn(1, length, V_HEADS, DIM), -2 * torch.rand(1, length, V_HEADS)
    return [x.requires_grad_() for x in (q, k, v, decay, torch.rand(1, length, V_HEADS))]


def seconds(route: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    """CPU seconds of all cores, which other processes hardly affect."""
    start = time.process_time()
    torch.autograd.grad(route(*tensors).square().sum(), tensors)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for length in args.lengths:
        tensors = inputs(length)
        routes = {name: route for name, route in ROUTES.items() if name != "token by token" or length <= 512}
        rounds = [{name: seconds(route, tensors) for name, route in routes.items()} for _ in range(args.rounds)]
        best = {name: f"{min(times[name] for times in rounds):.2f} s" for name in routes}
        print(f"{length} tokens: " + ", ".join(f"{name} {value}" for name, value in best.items()), flush=True)


if __name__ == "__main__":
    main()
