"""Time of element-wise operations, forward and backward, on the CPU: tunekit and plain torch.

    python benchmarks/elementwise.py [norm] [rope] [glu] [decode] [--threads 2] [--rounds 15] [--tokens 2048]

Also shows the time of a memory copy with the same number of bytes. Implementations alternate; the table shows
medians, with minima in parentheses. `decode` measures one token, as in generation.
"""

import argparse
from collections.abc import Callable, Mapping

import torch
from interleave import Workload, measure_interleaved
from reporting import describe_environment, format_milliseconds
from torch import Tensor

from tunekit.kernels import glu, rms_norm, rope

BF16 = torch.bfloat16
DIM, INTERMEDIATE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64  # of a Llama with 135 million parameters
NORM_OPTIONS = 1e-5, 0.0, False  # eps, offset, scale in fp32
CALLS = 100  # per measurement of one token
Operation = Callable[..., tuple[Tensor, ...]]


def print_times(name: str, workloads: Mapping[str, Workload], rounds: int) -> None:
    """Print a table row: the times of each workload."""
    times = measure_interleaved(workloads, rounds).values()
    print(f"| {name} | {' | '.join(format_milliseconds(seconds, 3) for seconds in times)} |", flush=True)


def build_copy(num_values: int) -> Workload:
    """Copy that reads and writes `num_values` bf16 values in total."""
    source = torch.randn(max(num_values // 2, 1)).to(BF16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def compare_passes(
    name: str, operation: Operation, reference: Operation, inputs: tuple[Tensor, ...], rounds: int
) -> None:
    """Print a row for the forward pass and one for the backward pass."""
    inputs = tuple(x.requires_grad_() for x in inputs)
    outputs = {"tunekit": operation(*inputs), "torch": reference(*inputs)}
    grads = tuple(torch.randn_like(y) for y in outputs["tunekit"])
    num_inputs, num_outputs = (sum(x.numel() for x in tensors) for tensors in (inputs, outputs["tunekit"]))
    forward: dict[str, Workload] = {"tunekit": lambda: operation(*inputs), "torch": lambda: reference(*inputs)}
    print_times(f"{name}, forward", forward | {"copy": build_copy(num_inputs + num_outputs)}, rounds)
    backward: dict[str, Workload] = {
        library: lambda y=y: torch.autograd.grad(y, inputs, grads, retain_graph=True) for library, y in outputs.items()
    }
    num_read = num_outputs if name.startswith("rope") else num_outputs + num_inputs  # that of RoPE needs no inputs
    print_times(f"{name}, backward", backward | {"copy": build_copy(num_read + num_inputs)}, rounds)


def compare_norm(num_tokens: int, rounds: int) -> None:
    weight = torch.rand(DIM).to(BF16)
    compare_passes(
        f"norm {num_tokens} x {DIM}",
        lambda x: (rms_norm.rms_norm(x, weight, *NORM_OPTIONS),),
        lambda x: (rms_norm.reference(x, weight, *NORM_OPTIONS),),
        (random_bf16(num_tokens, DIM),),
        rounds,
    )


def compare_rope(num_tokens: int, rounds: int) -> None:
    tables = random_rope_tables(num_tokens)
    compare_passes(
        f"rope {num_tokens} x {HEADS} + {KV_HEADS} x {HEAD_DIM}",
        lambda q, k: rope.apply_rope(q, k, tables),
        lambda q, k: (rope.reference(q, tables), rope.reference(k, tables)),
        (random_bf16(1, num_tokens, HEADS, HEAD_DIM), random_bf16(1, num_tokens, KV_HEADS, HEAD_DIM)),
        rounds,
    )


def compare_glu(num_tokens: int, rounds: int) -> None:
    for act in ("silu", "gelu_tanh", "clamped_swiglu"):
        compare_passes(
            f"{act} {num_tokens} x {INTERMEDIATE_SIZE}",
            lambda gate, up, act=act: (glu.gated_activation(act, gate, up),),
            lambda gate, up, act=act: (glu.ACTIVATIONS[act](gate, up),),
            (random_bf16(num_tokens, INTERMEDIATE_SIZE), random_bf16(num_tokens, INTERMEDIATE_SIZE)),
            rounds,
        )


def compare_decode(_: int, rounds: int) -> None:
    """One token, as in generation: the overhead of calls dominates."""
    x, weight, tables = random_bf16(1, 1, DIM), torch.rand(DIM).to(BF16), random_rope_tables(1)
    q, k = random_bf16(1, 1, HEADS, HEAD_DIM), random_bf16(1, 1, KV_HEADS, HEAD_DIM)
    gate = random_bf16(1, 1, INTERMEDIATE_SIZE)
    workloads: dict[str, tuple[Workload, Workload]] = {
        "norm": (lambda: rms_norm.rms_norm(x, weight, 1e-5), lambda: rms_norm.reference(x, weight, *NORM_OPTIONS)),
        "rope": (lambda: rope.apply_rope(q, k, tables), lambda: (rope.reference(q, tables), rope.reference(k, tables))),
        "silu": (lambda: glu.gated_activation("silu", gate, gate), lambda: glu.ACTIVATIONS["silu"](gate, gate)),
    }
    with torch.inference_mode():
        for name, (operation, reference) in workloads.items():
            repeated = {"tunekit": repeat(operation), "torch": repeat(reference)}
            print_times(f"{name} of one token, {CALLS} calls", repeated, rounds)


def repeat(workload: Workload) -> Workload:
    return lambda: [workload() for _ in range(CALLS)]


def random_bf16(*shape: int) -> Tensor:
    return torch.randn(shape).to(BF16)


def random_rope_tables(num_tokens: int) -> rope.RopeTables:
    angle = torch.rand(1, num_tokens, 1, HEAD_DIM // 2)
    return rope.RopeTables(angle.cos(), angle.sin())


SECTIONS = {"norm": compare_norm, "rope": compare_rope, "glu": compare_glu, "decode": compare_decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=[*SECTIONS])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{describe_environment()}; bf16\n\n| ms | tunekit | plain torch | copy |\n|---|---|---|---|")
    for section in args.sections:
        SECTIONS[section](args.tokens, args.rounds)


if __name__ == "__main__":
    main()
