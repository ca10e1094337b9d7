"""Time of linear layers with LoRA on the CPU, compared with separate operations of plain torch.

    python benchmarks/lora.py [layers] [steps] [--threads 2] [--rounds 9]

Implementations alternate; the table shows medians, with minima in parentheses, and the speedup over the first row.
`separate` runs the base matmul, dropout, A, B, scale and sum as separate operations with their autograd state. Shapes
are those of a Llama with 135 million parameters and 2,048 tokens, rank 16, bf16.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from interleave import Workload, measure_interleaved
from reporting import describe_environment, print_times
from torch import Tensor
from training_step import LLAMA_135M, build_cpu_training_step

from tunekit.adapters import config as adapters
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.kernels import lora
from tunekit.kernels.malloc import retain_freed_memory
from tunekit.models import linear
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.quantization.config import NoQuantization

BF16 = torch.bfloat16
# Layers with the same input: in_features, and out_features of each
GROUPS = {
    "q, k, v": (576, (576, 192, 192)),
    "o": (576, (576,)),
    "gate, up": (576, (1536, 1536)),
    "down": (1536, (576,)),
}
LAYER_ADAPTERS = {"LoRA": LoRAConfig(16), "dropout 0.1": LoRAConfig(16, dropout=0.1), "DoRA": DoRAConfig(16)}
STEP_ADAPTERS = {"LoRA": LoRAConfig(16), "DoRA": DoRAConfig(16), "full": NoAdapter()}
HEADER = "ms | speedup over the first row |\n|---|---|---|"


def separate_lora_linear(
    x: Tensor, lora_weights: Sequence[lora.LoRAWeights], dropout: float = 0.0
) -> tuple[Tensor, ...]:
    """Each layer separately, in plain torch."""
    outputs = []
    for weights in lora_weights:
        low_rank = F.linear(F.dropout(x, dropout), weights.a.to(x.dtype))
        outputs.append(weights.base.matmul(x) + F.linear(low_rank, weights.b.to(x.dtype)) * weights.scale)
    return tuple(outputs)


def full_row_norms(weights: lora.LoRAWeights) -> Tensor:
    """Norms of the rows of a full weight in fp32."""
    with torch.no_grad():
        base = torch.cat([*weights.base.iter_fp32_rows(2**40)])
        return (base + weights.scale * (weights.b @ weights.a)).norm(dim=1)


def linear_without_kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@contextmanager
def use_plain_torch() -> Iterator[None]:
    """Replace kernels by plain torch."""
    originals = adapters.lora_linear, adapters.lora_row_norms, linear.linear
    adapters.lora_linear, adapters.lora_row_norms = separate_lora_linear, full_row_norms
    linear.linear = linear_without_kernel
    yield
    adapters.lora_linear, adapters.lora_row_norms, linear.linear = originals


def without_kernels(workload: Workload) -> Workload:
    def run() -> None:
        with use_plain_torch():
            workload()

    return run


def measure_layers(rounds: int) -> None:
    """Forward and backward pass of groups of layers with the same input."""
    for name, adapter in LAYER_ADAPTERS.items():
        print(f"\n| {name}, 2,048 tokens | {HEADER}")
        for group, (in_features, out_features) in GROUPS.items():
            adapted = build_group_pass(adapter, in_features, out_features)
            workloads = {
                f"{group}: separate": without_kernels(adapted),
                f"{group}: tunekit": adapted,
                f"{group}: without adapter": build_group_pass(None, in_features, out_features),
            }
            print_times(measure_interleaved(workloads, rounds), speedup=True)


def build_group_pass(adapter: LoRAConfig | None, in_features: int, out_features: tuple[int, ...]) -> Workload:
    """Forward and backward pass of layers with the same input."""
    layers = [Linear(in_features, size, bias=False).to(BF16).requires_grad_(False) for size in out_features]
    for layer in layers:
        layer.weight.normal_(std=in_features**-0.5)
        if adapter is not None:
            adapter.wrap_layer(layer, 16, 32.0)
            for parameter in layer.parameters():
                if parameter.is_meta:
                    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.randn(parameter.shape) * 0.02))
    x = torch.randn(4, 512, in_features, dtype=BF16, requires_grad=True)
    grads = [torch.randn(4, 512, size, dtype=BF16) for size in out_features]
    inputs = [x, *(p for layer in layers for p in layer.parameters() if p.requires_grad)]
    return lambda: torch.autograd.grad(shared_input_linears(layers, x), inputs, grads)


def measure_steps(rounds: int) -> None:
    """Training steps: forward, backward, AdamW; 4 packed rows of 512 tokens."""
    print(f"\n| step of 2,048 tokens, 135M | {HEADER}")
    for name, adapter in STEP_ADAPTERS.items():
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(LLAMA_135M))
            step = build_cpu_training_step(HFCheckpoint.open(Path(directory)), NoQuantization(), adapter)
        workloads = {f"{name}: plain torch": without_kernels(step), f"{name}: tunekit": step}
        print_times(measure_interleaved(workloads, rounds), speedup=True)


SECTIONS = {"layers": measure_layers, "steps": measure_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=[*SECTIONS])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    retain_freed_memory()  # as recipes do
    print(describe_environment())
    for section in args.sections:
        SECTIONS[section](args.rounds)
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
