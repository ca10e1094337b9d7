"""Time of element-wise operations, forward and backward, on the CPU: tunekit and plain torch.

    python benchmarks/element.py [norm] [rope] [glu] [token] [--threads 2] [--rounds 15] [--tokens 2048]

Also shows the time of a memory copy with the same number of bytes. Implementations alternate; the table shows
medians, with minima in brackets.
"""

import argparse
import os
import platform
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from turns import Work, turns

from tunekit.env_info import describe_hardware
from tunekit.kernels import glu, rms_norm, rope

BF16 = torch.bfloat16
DIM, HIDDEN, HEADS, KV_HEADS, HEAD = 576, 1536, 9, 3, 64  # of a Llama with 135 million parameters


def print_times(name: str, workloads: dict[str, Work], rounds: int) -> None:
    """Print a line: median of each implementation, with minima in brackets."""
    times = turns(workloads, rounds).values()
    cells = (f"{statistics.median(s) * 1e3:.3f} ({min(s) * 1e3:.3f})" for s in times)
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def copy(numel: int) -> Work:
    """Read and write `numel` bf16 values in total."""
    source = torch.randn(max(numel // 2, 1)).to(BF16)
    buffer = torch.empty_like(source)
    return lambda: buffer.copy_(source)


def compare_forward_and_backward(
    name: str,
    ours: Callable[..., tuple[Tensor, ...]],
    plain: Callable[..., tuple[Tensor, ...]],
    leaves: tuple[Tensor, ...],
    rounds: int,
) -> None:
    """A line for the forward pass and one for the backward pass."""
    leaves = tuple(leaf.requires_grad_() for leaf in leaves)
    outputs = {"ours": ours(*leaves), "plain": plain(*leaves)}
    grads = tuple(torch.randn_like(y) for y in outputs["ours"])
    read, written = sum(t.numel() for t in leaves), sum(t.numel() for t in outputs["ours"])
    forward: dict[str, Work] = {"ours": lambda: ours(*leaves), "plain": lambda: plain(*leaves)}
    print_times(f"{name}, forward", forward | {"copy": copy(read + written)}, rounds)
    back: dict[str, Work] = {
        name: lambda y=y: torch.autograd.grad(y, leaves, grads, retain_graph=True) for name, y in outputs.items()
    }
    input_bytes = 0 if name.startswith("rope") else read  # the backward pass of RoPE reads only the gradient
    print_times(f"{name}, backward", back | {"copy": copy(input_bytes + written + read)}, rounds)


def norms(tokens: int, rounds: int) -> None:
    weight = torch.rand(DIM).to(BF16)

    def single_output(work: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda x: (work(x, weight, 1e-5, 0.0, False),)

    compare_forward_and_backward(
        f"norm {tokens} x {DIM}",
        single_output(rms_norm.rms_norm),
        single_output(rms_norm.reference),
        (random(tokens, DIM),),
        rounds,
    )


def ropes(tokens: int, rounds: int) -> None:
    table = rotation(tokens)
    leaves = random(1, tokens, HEADS, HEAD), random(1, tokens, KV_HEADS, HEAD)
    plain = lambda q, k: (rope.reference(q, table), rope.reference(k, table))  # noqa: E731
    compare_forward_and_backward(
        f"rope {tokens} x {HEADS} + {KV_HEADS} x {HEAD}",
        lambda q, k: rope.apply_rope(q, k, table),
        plain,
        leaves,
        rounds,
    )


def glus(tokens: int, rounds: int) -> None:
    for act in ("silu", "gelu_tanh", "clamped_swiglu"):
        leaves = random(tokens, HIDDEN), random(tokens, HIDDEN)
        ours, plain = (lambda g, u, f=f, act=act: (f(act, g, u),) for f in (glu.gated_activation, reference))
        compare_forward_and_backward(f"{act} {tokens} x {HIDDEN}", ours, plain, leaves, rounds)


def token(_: int, rounds: int) -> None:
    """One token, as in generation: the overhead of calls dominates."""
    x, weight, table = random(1, 1, DIM), torch.rand(DIM).to(BF16), rotation(1)
    q, k, gate = random(1, 1, HEADS, HEAD), random(1, 1, KV_HEADS, HEAD), random(1, 1, HIDDEN)
    works: dict[str, tuple[Work, Work]] = {
        "grad_norm": (
            lambda: rms_norm.rms_norm(x, weight, 1e-5),
            lambda: rms_norm.reference(x, weight, 1e-5, 0.0, False),
        ),
        "rope": (lambda: rope.apply_rope(q, k, table), lambda: (rope.reference(q, table), rope.reference(k, table))),
        "silu": (lambda: glu.gated_activation("silu", gate, gate), lambda: reference("silu", gate, gate)),
    }
    with torch.inference_mode():
        for name, (ours, plain) in works.items():
            print_times(f"{name} of a token, 100 times", {"ours": repeated(ours), "plain": repeated(plain)}, rounds)


def repeated(work: Work) -> Work:
    return lambda: [work() for _ in range(100)]


def reference(act: str, gate: Tensor, up: Tensor) -> Tensor:
    return glu.ACTIVATIONS[act](gate, up)


def random(*shape: int) -> Tensor:
    return torch.randn(shape).to(BF16)


def rotation(tokens: int) -> rope.RopeTables:
    angle = torch.rand(1, tokens, 1, HEAD // 2)
    return rope.RopeTables(angle.cos(), angle.sin())


def main() -> None:
    known = {"grad_norm": norms, "rope": ropes, "glu": glus, "token": token}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[*known])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{describe_hardware(torch.device('cpu'))}, {args.threads} threads, torch {torch.__version__}, "
          f"Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}; bf16")  # fmt: skip
    print("\n| ms | ours | plain torch | a copy |\n|---|---|---|---|")
    for name in args.what:
        known[name](args.tokens, args.rounds)


if __name__ == "__main__":
    main()
