"""Time of 4-bit weights, compared with bf16 weights: dequantization, matmuls, and training steps.

    python benchmarks/nf4.py [dequantize] [matmul] [steps] [gpu] [--threads 2] [--rounds 15]

Implementations alternate; the table shows medians, with minima in parentheses. bitsandbytes is measured if it is
installed. The report shows the load of the machine; `--cpu-time` measures CPU time, which other processes affect less.
"""

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from interleave import Clock, Workload, measure_interleaved
from reporting import describe_environment, print_times
from torch import Tensor
from training_step import LLAMA_135M, build_cpu_training_step

from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.kernels import nf4
from tunekit.kernels.triton_support import triton_kernels
from tunekit.quantization.config import NF4Config, NoQuantization

BF16 = torch.bfloat16
# Tokens, out_features, in_features: layers of models with 135 million and 8 billion parameters
MATMUL_SHAPES = ((2048, 576, 576), (2048, 1536, 576), (2048, 576, 1536), (512, 4096, 4096))
MATMUL_SHAPES += tuple((rows, 4096, 4096) for rows in (1, 2, 4, 8)) + ((1, 576, 576), (4, 576, 576))
GPU_WEIGHT_SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
GPU_LAUNCHES = 100  # per measurement


def print_table(title: str, workloads: dict[str, Workload], rounds: int, clock: Clock) -> None:
    print(f"\n| {title} | ms | time relative to the first row |\n|---|---|---|")
    print_times(measure_interleaved(workloads, rounds, clock))


def measure_dequantize(rounds: int, clock: Clock) -> None:
    """Dequantization of 4096 x 4096 to bf16, and quantization."""
    weight = torch.randn(4096, 4096, dtype=BF16)
    packed, scales = (x.view(4096, -1) for x in nf4.quantize(weight))
    codes, outer_scales = nf4.double_quantize(scales.view(-1))
    scale_bytes = scales.view(torch.uint8)
    single = nf4.NF4Weight(packed, scale_bytes, None, "nf4")
    double = nf4.NF4Weight(packed, codes.view(4096, -1), outer_scales.view(torch.uint8), "nf4")
    output, bf16_copy = torch.empty_like(weight), torch.empty_like(weight)
    workloads: dict[str, Workload] = {
        "tunekit, into allocated memory": lambda: nf4.decode(single, output),
        "tunekit, double quantization": lambda: nf4.decode(double, output),
        "tunekit, into new memory": lambda: nf4.dequantize(packed, scale_bytes, None, "nf4", BF16),
        "tunekit, plain torch": lambda: nf4.dequantize_reference(packed, scales, "nf4").to(BF16),
        "copy of the bf16 weight": lambda: output.copy_(bf16_copy),
        "zeros into allocated memory": lambda: output.zero_(),
    }
    quantizers: dict[str, Workload] = {"tunekit": lambda: nf4.quantize(weight)}
    if importlib.util.find_spec("bitsandbytes"):
        functional = importlib.import_module("bitsandbytes.functional")
        bnb_packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        workloads["bitsandbytes"] = lambda: functional.dequantize_4bit(bnb_packed, state)
        bnb_kernel = build_bitsandbytes_kernel_call(bnb_packed, state.absmax, output)
        workloads["bitsandbytes, only the kernel, into allocated memory"] = bnb_kernel
        quantizers["bitsandbytes"] = lambda: functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    print_table("dequantize 4096 x 4096", workloads, rounds, clock)
    print_table("quantize 4096 x 4096", quantizers, 3, clock)


def build_bitsandbytes_kernel_call(packed: Tensor, scales: Tensor, output: Tensor) -> Workload:
    """Call of the compiled function of bitsandbytes; its operator also allocates the output."""
    library = importlib.import_module("bitsandbytes.cextension").lib
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (packed, scales, output)]
    sizes = [ctypes.c_longlong(size) for size in (64, *output.shape)]
    return lambda: library.cdequantize_blockwise_cpu_nf4_bf16(*pointers, *sizes)


def measure_matmul(rounds: int, clock: Clock) -> None:
    """x W^T and its backward pass for the input, compared with a bf16 weight."""
    print("\n| tokens x out x in | ms | time relative to bf16 |\n|---|---|---|")
    for num_tokens, out_features, in_features in MATMUL_SHAPES:
        weight = torch.randn(out_features, in_features, dtype=BF16)
        packed, scales = nf4.quantize(weight)
        nf4_weight = packed.view(out_features, -1), scales.view(out_features, -1).view(torch.uint8), None, "nf4"
        x, grad = torch.randn(num_tokens, in_features, dtype=BF16), torch.randn(num_tokens, out_features, dtype=BF16)
        name = f"{num_tokens} x {out_features} x {in_features}"
        forward: dict[str, Workload] = {
            f"{name}, bf16": lambda x=x, w=weight: F.linear(x, w),
            f"{name}, nf4": lambda x=x, w=nf4_weight: nf4.matmul(x, *w, None),
        }
        if num_tokens <= nf4.MAX_FUSED_ROWS:
            forward[f"{name}, nf4, not fused"] = disable_fused_matmul(forward[f"{name}, nf4"])
        backward: dict[str, Workload] = {
            f"{name}, backward, bf16": lambda g=grad, w=weight: g @ w,
            f"{name}, backward, nf4": lambda g=grad, w=nf4_weight: nf4.matmul_backward(g, *w),
        }
        with torch.no_grad():
            print_times(measure_interleaved(forward, rounds, clock))
            print_times(measure_interleaved(backward, rounds, clock))


def disable_fused_matmul(workload: Workload) -> Workload:
    """The same without the kernel for few rows, which dequantizes in registers."""

    def run() -> None:
        original, nf4.MAX_FUSED_ROWS = nf4.MAX_FUSED_ROWS, 0
        workload()
        nf4.MAX_FUSED_ROWS = original

    return run


def measure_gpu(rounds: int, clock: Clock) -> None:
    """Matmuls with few rows on a GPU, fused or dequantized first, to choose the maximum number of rows."""
    print("\n| rows x out x in | fused, ms | dequantized first, ms | bf16, ms |\n|---|---|---|---|")
    for out_features, in_features in GPU_WEIGHT_SHAPES:
        weight = torch.randn(out_features, in_features, dtype=BF16, device="cuda")
        packed, scales = nf4.quantize(weight)
        nf4_weight = packed.view(out_features, -1), scales.view(out_features, -1).view(torch.uint8), None
        tables = nf4.code_values("nf4", weight.device), nf4.dynamic_map(weight.device)
        for rows in (1, 2, 3, 8, 16):
            x = torch.randn(rows, in_features, dtype=BF16, device="cuda")
            workloads: tuple[Workload, ...] = (
                lambda x=x, w=nf4_weight, tables=tables: triton_kernels("nf4_matmul").matmul_fused(
                    x, w, "nf4", *tables, None
                ),
                lambda x=x, w=nf4_weight: F.linear(x, nf4.dequantize(*w, dtype=BF16)),
                lambda x=x, w=weight: F.linear(x, w),
            )
            times = " | ".join(f"{measure_launch(workload, rounds, clock):.3f}" for workload in workloads)
            print(f"| {rows} x {out_features} x {in_features} | {times} |", flush=True)


def measure_launch(workload: Workload, rounds: int, clock: Clock) -> float:
    """Median milliseconds per launch."""

    def run_launches() -> None:
        for _ in range(GPU_LAUNCHES):
            workload()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return statistics.median(measure_interleaved({"": run_launches}, rounds, clock)[""]) * 1e3 / GPU_LAUNCHES


def measure_steps(rounds: int, clock: Clock) -> None:
    """Step of a Llama with 135 million parameters: 4 packed rows of 512 tokens, rank 16 on all linear layers."""
    configs = {"LoRA": NoQuantization(), "QLoRA": NF4Config(), "QLoRA, double quantization": NF4Config(True)}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(LLAMA_135M))
        source = HFCheckpoint.open(Path(directory))
        workloads: dict[str, Workload] = {
            name: build_cpu_training_step(source, quantization, LoRAConfig(16))
            for name, quantization in configs.items()
        }
    print_table("step of 2,048 tokens, 135M", workloads, rounds, clock)


SECTIONS = {"dequantize": measure_dequantize, "matmul": measure_matmul, "steps": measure_steps, "gpu": measure_gpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["dequantize", "matmul", "steps"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, which other processes affect less")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{describe_environment()}; {'CPU' if args.cpu_time else 'wall'} time")
    for section in args.sections:
        SECTIONS[section](args.rounds, time.process_time if args.cpu_time else time.perf_counter)
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
