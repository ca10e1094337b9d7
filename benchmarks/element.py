"""Milliseconds of what stands between the products, forward and backward, on the CPU: ours, and plain torch.

python benchmarks/element.py [norm] [rope] [glu] [token] [--threads 2] [--rounds 15] [--tokens 2048]

Beside them the time in which memory could be copied that often: the bytes that must be read and written once, at the
rate of a copy of as many. Those that are compared run in turns; medians are told, and the least in brackets.
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
DIM, HIDDEN, HEADS, KV_HEADS, HEAD = 576, 1536, 9, 3, 64  # of a Llama of 135 million weights


def told(name: str, works: dict[str, Work], rounds: int) -> None:
    """A line: the median of each, and the least in brackets."""
    found = turns(works, rounds).values()
    cells = (f"{statistics.median(s) * 1e3:.3f} ({min(s) * 1e3:.3f})" for s in found)
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def copy(numbers: int) -> Work:
    """Reading and writing so many numbers of bf16 in all."""
    source = torch.randn(max(numbers // 2, 1)).to(BF16)
    room = torch.empty_like(source)
    return lambda: room.copy_(source)


def both(
    name: str,
    ours: Callable[..., tuple[Tensor, ...]],
    plain: Callable[..., tuple[Tensor, ...]],
    leaves: tuple[Tensor, ...],
    rounds: int,
) -> None:
    """A line for the way forward and one for the way back."""
    leaves = tuple(leaf.requires_grad_() for leaf in leaves)
    made = {"ours": ours(*leaves), "plain": plain(*leaves)}
    grads = tuple(torch.randn_like(y) for y in made["ours"])
    read, written = sum(t.numel() for t in leaves), sum(t.numel() for t in made["ours"])
    forward: dict[str, Work] = {"ours": lambda: ours(*leaves), "plain": lambda: plain(*leaves)}
    told(f"{name}, forward", forward | {"copy": copy(read + written)}, rounds)
    back: dict[str, Work] = {
        way: lambda y=y: torch.autograd.grad(y, leaves, grads, retain_graph=True) for way, y in made.items()
    }
    again = 0 if name.startswith("rope") else read  # a rotation needs nothing but the gradient
    told(f"{name}, backward", back | {"copy": copy(again + written + read)}, rounds)


def norms(tokens: int, rounds: int) -> None:
    weight = torch.rand(DIM).to(BF16)

    def one(work: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda x: (work(x, weight, 1e-5, 0.0, False),)

    both(f"norm {tokens} x {DIM}", one(rms_norm.rms_norm), one(rms_norm.reference), (random(tokens, DIM),), rounds)


def ropes(tokens: int, rounds: int) -> None:
    table = rotation(tokens)
    leaves = random(1, tokens, HEADS, HEAD), random(1, tokens, KV_HEADS, HEAD)
    plain = lambda q, k: (rope.reference(q, table), rope.reference(k, table))  # noqa: E731
    both(
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
        both(f"{act} {tokens} x {HIDDEN}", ours, plain, leaves, rounds)


def token(_: int, rounds: int) -> None:
    """One token, as in generation: here calls cost more than numbers."""
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
            told(f"{name} of a token, 100 times", {"ours": often(ours), "plain": often(plain)}, rounds)


def often(work: Work) -> Work:
    return lambda: [work() for _ in range(100)]


def reference(act: str, gate: Tensor, up: Tensor) -> Tensor:
    return glu.GATED[act](gate, up)


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
