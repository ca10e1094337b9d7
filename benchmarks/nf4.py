"""Time of 4-bit weights on the CPU, compared with bf16 weights: decoding, matmuls, and training steps.

    python benchmarks/nf4.py [decode] [products] [steps] [gpu] [--threads 2] [--rounds 15]

Implementations alternate; the table shows medians, with minima in brackets. bitsandbytes is measured if it is
installed. The report shows the load of the machine; `--cpu` measures CPU time, which other processes affect less.
"""

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from turns import Work, turns

from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware
from tunekit.kernels import nf4
from tunekit.kernels.triton_support import triton_kernels
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NF4Config, NoQuantization

BF16 = torch.bfloat16
# tokens, out, in: layers of models with 135 million and 8 billion parameters
SIZES = ((2048, 576, 576), (2048, 1536, 576), (2048, 576, 1536), (512, 4096, 4096))
SIZES += tuple((rows, 4096, 4096) for rows in (1, 2, 4, 8)) + ((1, 576, 576), (4, 576, 576))
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def compare(workloads: dict[str, Work], rounds: int, clock: Callable[[], float]) -> None:
    """Print a line per workload, with its time relative to the first."""
    seconds = turns(workloads, rounds, clock)
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"| {name} | {middle * 1e3:.2f} ({min(times) * 1e3:.2f}) | {middle / first:.2f} |", flush=True)


def decode(rounds: int, clock: Callable[[], float]) -> None:
    """4096 x 4096 to bf16."""
    size = 4096, 4096
    weight = torch.randn(size, dtype=BF16)
    packed, scales = nf4.quantize(weight)
    codes, outer = nf4.double_quantize(scales)
    parts = packed.view(4096, -1), scales.view(4096, -1)
    plain = nf4.NF4Weight(parts[0], parts[1].view(torch.uint8), None, "nf4")
    nested = nf4.NF4Weight(parts[0], codes.view(4096, -1), outer.view(torch.uint8), "nf4")
    output, bf16_copy = torch.empty(size, dtype=BF16), torch.empty(size, dtype=BF16)
    works: dict[str, Callable[[], object]] = {
        "tunekit, into warm memory": lambda: nf4.decode(plain, output),
        "tunekit, nested scales": lambda: nf4.decode(nested, output),
        "tunekit, into new memory": lambda: nf4.dequantize(parts[0], parts[1].view(torch.uint8), None, "nf4", BF16),
        "tunekit, plain torch": lambda: nf4.dequantize_reference(*parts, "nf4").to(BF16),
        "a copy of the bf16 numbers": lambda: output.copy_(bf16_copy),
        "zeros into the same memory": lambda: output.zero_(),
    }
    if importlib.util.find_spec("bitsandbytes"):
        functional = importlib.import_module("bitsandbytes.functional")
        theirs, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        works["bitsandbytes"] = lambda: functional.dequantize_4bit(theirs, state)
        works["bitsandbytes' loop alone, into warm memory"] = loop(theirs, state.absmax, output)
    print("\n| decode 4096 x 4096 | ms | times the first |\n|---|---|---|")
    compare(works, rounds, clock)
    print("\n| quantize 4096 x 4096 | ms | times the first |\n|---|---|---|")
    quantizers = {"tunekit": lambda: nf4.quantize(weight)}
    if importlib.util.find_spec("bitsandbytes"):
        quantizers["bitsandbytes"] = lambda: functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    compare(quantizers, 3, clock)


def loop(packed: torch.Tensor, scales: torch.Tensor, output: torch.Tensor) -> Callable[[], object]:
    """The compiled function of bitsandbytes; its operator also allocates the output."""
    lib = importlib.import_module("bitsandbytes.cextension").lib
    places = [ctypes.c_void_p(t.data_ptr()) for t in (packed, scales, output)]
    return lambda: lib.cdequantize_blockwise_cpu_nf4_bf16(*places, *map(ctypes.c_longlong, (64, *output.shape)))


def products(rounds: int, clock: Callable[[], float]) -> None:
    """x W^T and its backward pass for the input, compared with a bf16 weight."""
    print("\n| tokens x out x in | ms | times the first |\n|---|---|---|")
    for sizes in SIZES:
        product(sizes, rounds, clock)


def product(sizes: tuple[int, int, int], rounds: int, clock: Callable[[], float]) -> None:
    tokens, out, inner = sizes
    weight = torch.randn(out, inner, dtype=BF16)
    packed, scales = nf4.quantize(weight)
    parts = packed.view(out, -1), scales.view(out, -1).view(torch.uint8), None, "nf4"
    x, grad = torch.randn(tokens, inner, dtype=BF16), torch.randn(tokens, out, dtype=BF16)
    name = f"{tokens} x {out} x {inner}"
    forward: dict[str, Callable[[], object]] = {f"{name}, bf16": lambda: F.linear(x, weight)}
    back: dict[str, Callable[[], object]] = {f"{name}, back, bf16": lambda: grad @ weight}
    forward[f"{name}, nf4"] = lambda: nf4.matmul(x, *parts, None)
    back[f"{name}, back, nf4"] = lambda: nf4.matmul_backward(grad, *parts)
    if tokens <= nf4.MAX_FUSED_ROWS:
        forward[f"{name}, nf4 decoded first"] = without(lambda: nf4.matmul(x, *parts, None))
    with torch.no_grad():
        compare(forward, rounds, clock)
        compare(back, rounds, clock)


def without(work: Callable[[], object]) -> Callable[[], object]:
    """The same without the kernel for few rows."""

    def run() -> None:
        original, nf4.MAX_FUSED_ROWS = nf4.MAX_FUSED_ROWS, 0
        work()
        nf4.MAX_FUSED_ROWS = original

    return run


def gpu(rounds: int, clock: Callable[[], float]) -> None:
    """Matmuls with few rows on a GPU, fused or dequantized first, to choose the maximum number of rows."""
    print("\n| rows x out x in | on the way, ms | dequantized first, ms | bf16, ms |\n|---|---|---|---|")
    for out, inner in ((4096, 4096), (14336, 4096), (4096, 14336)):
        weight = torch.randn(out, inner, dtype=BF16, device="cuda")
        packed, scales = nf4.quantize(weight)
        parts = packed.view(out, -1), scales.view(out, -1).view(torch.uint8), None
        tables = nf4.code_values("nf4", weight.device), nf4.dynamic_map(weight.device)
        for rows in (1, 2, 3, 8, 16):
            x = torch.randn(rows, inner, dtype=BF16, device="cuda")
            works = (
                lambda x=x, parts=parts, tables=tables: triton_kernels("nf4_matmul").matmul_fused(
                    x, parts, "nf4", *tables, None
                ),
                lambda x=x, parts=parts: F.linear(x, nf4.dequantize(*parts, dtype=BF16)),
                lambda x=x, weight=weight: F.linear(x, weight),
            )
            times = " | ".join(f"{launched(work, rounds, clock):.3f}" for work in works)
            print(f"| {rows} x {out} x {inner} | {times} |", flush=True)


def launched(fn: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    """Milliseconds per launch, over a hundred launches."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = clock()
        for _ in range(100):
            fn()
        torch.cuda.synchronize()
        times.append((clock() - start) * 10)
    return statistics.median(times[1:])


def steps(rounds: int, clock: Callable[[], float]) -> None:
    """Step of a Llama with 135 million parameters: 4 packed rows of 512 tokens, rank 16 on all linear layers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL))
        source = HFCheckpoint.open(Path(folder))
        works = {
            name: step(source, weights, LoRAConfig(16))
            for name, weights in {"LoRA": NoQuantization(), "QLoRA": NF4Config(), "nested": NF4Config(True)}.items()
        }
    print("\n| step of 2,048 tokens, 135M | ms | times the first |\n|---|---|---|")
    compare(works, rounds, clock)


def step(source: HFCheckpoint, weights: NoQuantization, adapter: NoAdapter | LoRAConfig) -> Callable[[], object]:
    """A full step: forward, backward, AdamW; 4 packed rows of 512 tokens."""
    model = build.build_model(
        source,
        weights,
        adapter,
        PrecisionConfig("bf16", frozen_dtype="bf16"),
        MemoryConfig(),
        DistributedContext(0, "cpu"),
        from_scratch=True,
    )
    optimizer, loss = AdamWConfig(lr=1e-4).build(adapter.param_groups(model)), CrossEntropy()
    rows = torch.randint(0, 49152, (4, 512))
    lengths = torch.tensor([200, 312] * 4)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).view(4, 512)
    batch = Batch(rows, rows.roll(-1, 1), positions, offsets, rows.numel(), rows.numel())

    def run() -> None:
        (loss(model, batch) / batch.num_target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    known = {"decode": decode, "products": products, "steps": steps, "gpu": gpu}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["decode", "products", "steps"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{describe_hardware(torch.device('cpu'))}, {args.threads} threads, torch {torch.__version__}, "
          f"Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}; "
          f"{'processor' if args.cpu else 'wall'} time")  # fmt: skip
    for name in args.what:
        known[name](args.rounds, time.process_time if args.cpu else time.perf_counter)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
