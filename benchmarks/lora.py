"""Time of linear layers with LoRA on the CPU, compared with separate operations of plain torch.

    python benchmarks/lora.py [layers] [steps] [--threads 2] [--rounds 9]

Implementations alternate; the table shows medians, with minima in brackets, and the ratio to the first. `separate`
runs the base matmul, dropout, A, B, scale and sum as separate operations with their autograd state. Shapes are
those of a Llama with 135 million parameters and 2,048 tokens, rank 16, bf16.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from nf4 import SMALL, step
from torch import Tensor
from turns import Work, turns

from tunekit.adapters import config as adapters
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.env_info import describe_hardware
from tunekit.kernels import lora
from tunekit.kernels.malloc import retain_freed_memory
from tunekit.models import linear
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.quantization.config import NoQuantization

BF16 = torch.bfloat16
GROUPS = {
    "q, k, v": (576, (576, 192, 192)),
    "o": (576, (576,)),
    "gate, up": (576, (1536, 1536)),
    "down": (1536, (576,)),
}


def compare(workloads: dict[str, Work], rounds: int) -> None:
    """Print a line per workload, with the time of the first relative to it."""
    seconds = turns(workloads, rounds)
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"| {name} | {middle * 1e3:.2f} ({min(times) * 1e3:.2f}) | {first / middle:.2f} |", flush=True)


def separate_operations(x: Tensor, updates: Sequence[lora.LoRAWeights], dropout: float = 0.0) -> tuple[Tensor, ...]:
    """Each layer separately, in plain torch."""
    ys = []
    for update in updates:
        low = F.linear(F.dropout(x, dropout), update.a.to(x.dtype))
        ys.append(update.base.matmul(x) + F.linear(low, update.b.to(x.dtype)) * update.scale)
    return tuple(ys)


def full_row_norms(update: lora.LoRAWeights) -> Tensor:
    """Norms of the rows of a full weight in fp32."""
    with torch.no_grad():
        weight = torch.cat([*update.base.iter_fp32_rows(2**40)])
        return (weight + update.scale * (update.b @ update.a)).norm(dim=1)


@contextmanager
def use_plain_torch() -> Iterator[None]:
    """Replace kernels by plain torch."""
    originals = adapters.lora_linear, adapters.lora_row_norms, linear.linear
    adapters.lora_linear, adapters.lora_row_norms = separate_operations, full_row_norms
    linear.linear = lambda x, w, b=None: F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype))
    yield
    adapters.lora_linear, adapters.lora_row_norms, linear.linear = originals


def plain(work: Work) -> Work:
    def run() -> None:
        with use_plain_torch():
            work()

    return run


def layers(rounds: int) -> None:
    """Forward and backward pass of groups of layers with the same input."""
    for name, adapter in {
        "LoRA": LoRAConfig(16),
        "dropout 0.1": LoRAConfig(16, dropout=0.1),
        "DoRA": DoRAConfig(16),
    }.items():
        print(f"\n| {name}, 2,048 tokens | ms | times as fast as the first |\n|---|---|---|")
        for group, (inner, outer) in GROUPS.items():
            work = group_step(adapter, inner, outer)
            base = group_step(None, inner, outer)
            compare({f"{group}: separate": plain(work), "ours": work, "without an update": base}, rounds)


def group_step(adapter: LoRAConfig | None, inner: int, outer: tuple[int, ...]) -> Work:
    linears = [Linear(inner, out, bias=False).to(BF16).requires_grad_(False) for out in outer]
    for layer in linears:
        layer.weight.normal_(std=inner**-0.5)
        if adapter is not None:
            adapter.wrap_layer(layer, 16, 32.0)
            for parameter in layer.parameters():
                if parameter.is_meta:
                    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.randn(parameter.shape) * 0.02))
    x = torch.randn(4, 512, inner, dtype=BF16, requires_grad=True)
    grads = [torch.randn(4, 512, out, dtype=BF16) for out in outer]
    inputs = [x, *(p for layer in linears for p in layer.parameters() if p.requires_grad)]
    return lambda: torch.autograd.grad(shared_input_linears(linears, x), inputs, grads)


def steps(rounds: int) -> None:
    """Full steps: forward, backward, AdamW; 4 packed rows of 512 tokens."""
    print("\n| step of 2,048 tokens, 135M | ms | times as fast as the first |\n|---|---|---|")
    for name, adapter in {"LoRA": LoRAConfig(16), "DoRA": DoRAConfig(16), "full": NoAdapter()}.items():
        work = build_step(adapter)
        compare({f"{name}: plain torch": plain(work), f"{name}: ours": work}, rounds)


def build_step(adapter: NoAdapter | LoRAConfig) -> Work:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL))
        return step(HFCheckpoint.open(Path(folder)), NoQuantization(), adapter)


def main() -> None:
    known = {"layers": layers, "steps": steps}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[*known])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    retain_freed_memory()  # as in a run
    print(f"{describe_hardware(torch.device('cpu'))}, {args.threads} threads, torch {torch.__version__}, "
          f"Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}")  # fmt: skip
    for name in args.what:
        known[name](args.rounds)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
