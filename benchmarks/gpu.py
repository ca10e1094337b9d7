"""Speed and memory of tunekit on a GPU, compared with hardware limits and transformers + peft (+ bitsandbytes).

    python benchmarks/gpu.py [limits dequantize lora qlora full memory vocabulary cuda_graph transformers_steps kernels]
        [--small]

Each section runs as a process with its own time limit, so that a failure does not affect the other sections.
Results are written after each section. All weights are random. `--small` runs the same code with small sizes on any
device.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reporting import BENCHMARKS, RESULTS
from torch import nn
from training_step import build_batch

from tunekit import assets
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware
from tunekit.kernels import nf4
from tunekit.kernels.cross_entropy import CrossEntropyTerms, linear_cross_entropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder, Head
from tunekit.models.families.registry import find_family
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.recipes import sft
from tunekit.selftest import random_step
from tunekit.selftest.hardware_limits import measure_copy_bandwidth, measure_matmul_rates, measure_seconds
from tunekit.selftest.random_step import build_training_step, count_operations
from tunekit.training.cuda_graph import set_up_cuda_graphs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA_8B, LLAMA_1B = "tunekit/llama3_1_8b", "tunekit/llama3_2_1b"
TINY = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "head_dim": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
BF16 = torch.bfloat16
TRANSFORMERS_ROWS = 2  # 4 rows are estimated at 75 GB


@dataclass(frozen=True)
class Size:
    """Sizes of all sections."""

    small: bool

    @property
    def steps(self) -> int:
        return 2 if self.small else 6

    @property
    def matmul_sizes(self) -> tuple[int, ...]:
        return (128, 256) if self.small else (4096, 8192)

    @property
    def copy_bytes(self) -> int:
        return 2**20 if self.small else 2**31

    def tokens(self, rows: int, length: int) -> tuple[int, int]:
        return (2, 64) if self.small else (rows, length)

    def config(self, name: str) -> dict:
        """config.json of a preset, or a much smaller one."""
        directory = assets.model_dir(name)
        assert directory is not None
        return read_json(directory / "config.json") | (TINY if self.small else {})


def measure_steps(run_step: Callable[[], object], size: Size) -> dict[str, float]:
    """Median step time, time of the first step, and peak allocated and reserved bytes."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(size.steps):
        start = time.perf_counter()
        run_step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    reserved = torch.cuda.max_memory_reserved() if DEVICE.type == "cuda" else 0
    step_time = statistics.median(seconds[size.steps // 3 :])
    return {"step": step_time, "first": seconds[0], "peak": peak, "reserved": reserved}


def build_random_model(
    config: dict,
    quantization: NoQuantization,
    adapter: NoAdapter | LoRAConfig,
    memory: MemoryConfig,
    precision: PrecisionConfig,
) -> Decoder:
    """Like `build.build_model`, but initialized on the device: on the CPU, 8B parameters take minutes."""
    spec = find_family(config, "config.json")[1]
    return random_step.build_random_model(spec, quantization, adapter, memory, precision, DEVICE)


def build_random_batch(vocab: int, rows: int, length: int, packed: bool = True) -> Batch:
    """Rows with one document each; packed: with documents of 1/8, 3/8 and 1/2 of a row."""
    tokens = torch.randint(0, vocab, (rows, length), device=DEVICE)
    document_lengths = [length // 8, 3 * length // 8, length // 2] if packed else [length]
    return build_batch(tokens, tokens.roll(-1, 1), document_lengths * rows)


def measure_training(
    size: Size, preset: str, quantization: NoQuantization, adapter: NoAdapter | LoRAConfig, **options: Any
) -> dict[str, float]:
    """Steps of tunekit with a preset; `options`: rows, length, packed, activation_checkpointing."""
    memory = MemoryConfig(activation_checkpointing=options.get("activation_checkpointing", "none"))
    master_dtype = "bf16" if type(adapter) is NoAdapter else "fp32"
    precision = PrecisionConfig("bf16", master_dtype=master_dtype, frozen_dtype="bf16")
    model = build_random_model(size.config(preset), quantization, adapter, memory, precision)
    batch_shape = size.tokens(options["rows"], options["length"])
    batch = build_random_batch(model.spec.vocab, *batch_shape, options.get("packed", True))
    results = measure_steps(build_training_step(model, adapter, batch), size)
    matmul_rate = max(measure_matmul_rates(DEVICE, size.matmul_sizes).values())
    flop_rate = count_operations(model, batch) / results["step"]
    return results | {"fraction of matmul rate": flop_rate / matmul_rate}


# Sections: functions that return values by name


def measure_limits(size: Size) -> dict[str, float]:
    """Copy bandwidth and square bf16 matmuls."""
    rates = measure_matmul_rates(DEVICE, size.matmul_sizes)
    results = {f"matmul TFLOP/s, size {matmul_size}": rate / 1e12 for matmul_size, rate in rates.items()}
    bandwidth = measure_copy_bandwidth(DEVICE, size.copy_bytes)
    return results | {"copy GB/s, read and written": bandwidth / 1e9}


def measure_dequantize(size: Size) -> dict[str, float]:
    """4-bit weights to bf16: fraction of the bandwidth of a copy with the same number of bytes. Many calls per
    synchronization.
    """
    out_features, in_features = (256, 128) if size.small else (14336, 8192)
    bandwidth, results = measure_copy_bandwidth(DEVICE, size.copy_bytes), {}
    for double_quant in (False, True):
        packed, scales = nf4.quantize(torch.randn(out_features, in_features, device=DEVICE))
        codes, outer_scales = nf4.double_quantize(scales) if double_quant else (scales.view(torch.uint8), None)
        outer_bytes = None if outer_scales is None else outer_scales.view(torch.uint8)
        weight = packed.view(out_features, -1), codes.view(out_features, -1), outer_bytes
        seconds = measure_repeated_calls(lambda weight=weight: nf4.dequantize(*weight, "nf4", BF16), size)
        num_bytes = packed.numel() + codes.numel() + 2 * out_features * in_features
        name = "double quantization" if double_quant else "single quantization"
        results |= {f"{name}, ms": seconds * 1e3, f"{name}, fraction of copy": num_bytes / seconds / bandwidth}
    if functional := try_import("bitsandbytes.functional"):
        weight = torch.randn(out_features, in_features, device=DEVICE, dtype=BF16)
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        seconds = measure_repeated_calls(lambda: functional.dequantize_4bit(packed, state), size)
        results["bitsandbytes, ms"] = 1e3 * seconds
    return results


def measure_repeated_calls(fn: Callable[[], object], size: Size) -> float:
    """Median seconds of a call."""
    num_calls = 2 if size.small else 20

    def run_calls() -> None:
        for _ in range(num_calls):
            fn()

    return statistics.median(measure_seconds(run_calls, 5, DEVICE)) / num_calls


def measure_lora(size: Size) -> dict[str, float]:
    """Step of an 8B Llama with bf16 weights and rank 16 on all linear layers, 4 rows of 2,048 tokens, then 2 rows, as
    in `transformers_steps`.
    """
    return measure_adapter_training(size, NoQuantization())


def measure_qlora(size: Size) -> dict[str, float]:
    """Step as in `lora`, with NF4 weights."""
    return measure_adapter_training(size, NF4Config())


def measure_adapter_training(size: Size, quantization: NoQuantization) -> dict[str, float]:
    options = {"length": 2048, "packed": False}
    results = measure_training(size, LLAMA_8B, quantization, LoRAConfig(16), rows=4, **options)
    gc.collect()
    smaller = measure_training(size, LLAMA_8B, quantization, LoRAConfig(16), rows=TRANSFORMERS_ROWS, **options)
    return results | {f"{TRANSFORMERS_ROWS} rows {key}": value for key, value in smaller.items()}


def measure_full(size: Size) -> dict[str, float]:
    """Full fine-tuning of a 1B Llama in bf16, 8,192 packed tokens."""
    options = {"rows": 4, "length": 2048}
    return measure_training(size, LLAMA_1B, NoQuantization(), NoAdapter(), **options)


def measure_memory(size: Size) -> dict[str, float]:
    """8B QLoRA at 2 x 2,048 with double quantization and full activation checkpointing."""
    options = {"rows": 2, "length": 2048, "activation_checkpointing": "full"}
    return measure_training(size, LLAMA_8B, NF4Config(True), LoRAConfig(16), **options)


def measure_vocabulary(size: Size) -> dict[str, float]:
    """Memory and time of head and loss by vocabulary size, without the head's weight."""
    num_tokens, dim = (64, 64) if size.small else (8192, 4096)
    results = {}
    for vocab in (512, 1024) if size.small else (32768, 65536, 131072, 262144):
        config = size.config(LLAMA_8B) | {"vocab_size": vocab, "hidden_size": dim}
        spec = replace(find_family(config, "config.json")[1], vocab=vocab, dim=dim)
        head = Head(spec).to(DEVICE, BF16).requires_grad_(False)
        hidden = torch.randn(num_tokens, dim, device=DEVICE, dtype=BF16, requires_grad=True)
        targets = torch.randint(0, vocab, (num_tokens,), device=DEVICE)
        initial_bytes = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
        steps = measure_steps(partial(run_loss, hidden, targets, head), size)
        results[f"GB at {vocab:,}"] = (steps["peak"] - initial_bytes) / 1e9
        results[f"ms at {vocab:,}"] = steps["step"] * 1e3
        del head, hidden
        gc.collect()
    return results


def run_loss(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> None:
    hidden.grad = None
    linear_cross_entropy(hidden, targets, head, CrossEntropyTerms()).backward()


def measure_cuda_graph(size: Size) -> dict[str, float]:
    """Steps of recipe sft with LoRA, with and without CUDA graphs, on packed rows of other documents in each step."""
    results = {}
    for preset, rows in (("smollm2_135m", 2), ("llama3_2_1b", 1), ("llama3_2_1b", 4)):
        for use_graphs in (False, True):
            steps = measure_sft_steps(size, f"tunekit/{preset}", rows, use_graphs)
            name = f"{preset}, {rows} x 2048, {'graphs' if use_graphs else 'eager'}"
            results |= {f"{name} {key}": value for key, value in steps.items()}
            gc.collect()
    return results


def measure_sft_steps(size: Size, preset: str, rows: int, use_graphs: bool) -> dict[str, float]:
    """Measure steps after twice as many warmup steps, in which graphs of most shapes are captured."""
    adapter = LoRAConfig(16)
    precision = PrecisionConfig("bf16", master_dtype="fp32", frozen_dtype="bf16")
    model = build_random_model(size.config(preset), NoQuantization(), adapter, MemoryConfig(), precision)
    cfg = sft.SFTConfig(model=preset, data=TextDataset(preset), output_dir=preset, cuda_graph=use_graphs)
    optimizer = AdamWConfig(lr=1e-5).build(adapter.param_groups(model))
    with DistributedContext(0, DEVICE.type) as dist:
        set_up_cuda_graphs(model, cfg, dist)
        batch_sizes = model.spec.vocab, *size.tokens(rows, 2048)
        batches = iter([build_random_documents(*batch_sizes, seed) for seed in range(3 * size.steps)])

        def run_step() -> None:
            sft.forward_backward(model, [next(batches)], cfg, dist)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2 * size.steps):
            run_step()
        return measure_steps(run_step, size)


def build_random_documents(vocab: int, rows: int, length: int, seed: int) -> Batch:
    """Packed rows of documents of 40 to 600 tokens; half of the tokens are targets. On the CPU, as in a data loader."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    document_lengths = []
    for _ in range(rows):
        remaining = length
        while remaining:
            document_lengths.append(min(remaining, rng.randint(40, 600)))
            remaining -= document_lengths[-1]
    tokens = torch.randint(0, vocab, (rows, length), generator=generator)
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(tokens.shape, generator=generator) < 0.5, IGNORE)
    return build_batch(tokens, targets, document_lengths)


def measure_transformers(size: Size) -> dict[str, float]:
    """transformers + peft in the same step, without and with the kernels of Liger: 2 rows with one document each, for
    which SDPA needs no mask.
    """
    methods = ("lora", "qlora") if try_import("bitsandbytes") else ("lora",)
    results = {}
    for use_liger in (False, True) if try_import("liger_kernel") else (False,):
        if use_liger:
            importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
        for method in methods:
            steps = measure_transformers_steps(size, quantize=method == "qlora")
            results |= {f"{'liger ' * use_liger}{method} {key}": value for key, value in steps.items()}
            gc.collect()
    return results


def measure_transformers_steps(size: Size, quantize: bool) -> dict[str, float]:
    transformers, peft = (importlib.import_module(module) for module in ("transformers", "peft"))
    config = transformers.LlamaConfig(**size.config(LLAMA_8B))
    with torch.device(DEVICE):
        torch.set_default_dtype(BF16)
        model = transformers.LlamaForCausalLM(config).to(BF16)
        torch.set_default_dtype(torch.float32)
    if quantize:
        quantize_with_bitsandbytes(model)
    lora_config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora_config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, size.tokens(TRANSFORMERS_ROWS, 2048), device=DEVICE)
    model.train()

    def run_step() -> None:
        with torch.autocast(DEVICE.type, BF16):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure_steps(run_step, size)


def quantize_with_bitsandbytes(model: nn.Module) -> None:
    """Replace the linear layers of the blocks by bitsandbytes 4-bit layers."""
    modules = importlib.import_module("bitsandbytes.nn")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and ".layers." in name:
            quantized = modules.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=BF16, quant_type="nf4"
            )
            quantized.weight = modules.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, quantized.to(DEVICE))


def run_kernel_tests(size: Size) -> dict[str, float]:
    """All tests of kernels that need a GPU."""
    options = ["-k", "nf4", "--collect-only"] if size.small else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/unit/kernels"]
    process = subprocess.run([*command, *options], cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False)
    print(process.stdout[-3000:], file=sys.stderr)
    summary = [line for line in process.stdout.splitlines() if line.strip()][-1:]
    return {f"exit code {process.returncode}: {' '.join(summary)}": process.returncode}


def try_import(name: str) -> Any:
    """Import a module if its package is installed, else None."""
    return importlib.import_module(name) if importlib.util.find_spec(name.partition(".")[0]) else None


@dataclass(frozen=True)
class Section:
    measure: Callable[[Size], dict[str, float]]
    timeout: int  # seconds


SECTIONS = {
    "limits": Section(measure_limits, 40),
    "dequantize": Section(measure_dequantize, 40),
    "lora": Section(measure_lora, 90),
    "qlora": Section(measure_qlora, 90),
    "full": Section(measure_full, 60),
    "memory": Section(measure_memory, 80),
    "vocabulary": Section(measure_vocabulary, 40),
    "cuda_graph": Section(measure_cuda_graph, 60),
    "transformers_steps": Section(measure_transformers, 180),
    "kernels": Section(run_kernel_tests, 120),
}


def run_section(name: str, small: bool) -> dict[str, float | str]:
    """Run a section in its own process; the result contains the reason if it failed."""
    timeout = SECTIONS[name].timeout
    command = [sys.executable, __file__, name, "--child", *(["--small"] if small else [])]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not complete after {timeout} s"}
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        return {"error": " / ".join(lines[-3:])[-500:]}
    return json.loads(process.stdout.splitlines()[-1])


def format_report(results: dict[str, dict[str, float | str]], seconds: dict[str, float]) -> str:
    """All results as Markdown."""
    text = f"# {describe_hardware(DEVICE)}, {date.today()}\n\n"
    text += f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}. "
    text += "All weights are random.\n"
    lora_step, qlora_step = (results.get(name, {}).get("step") for name in ("lora", "qlora"))
    if isinstance(lora_step, float) and isinstance(qlora_step, float):
        text += f"\nQLoRA step time relative to LoRA: {qlora_step / lora_step:.3f} x.\n"
    for name, values in results.items():
        doc = SECTIONS[name].measure.__doc__ or ""
        text += f"\n## {name}\n\n{doc} ({seconds[name]:.0f} s in total)\n\n| | |\n|---|---|\n"
        text += "".join(f"| {key} | {format_value(key, value)} |\n" for key, value in values.items())
    return text


def format_value(key: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if key.endswith(("peak", "reserved")):
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=[*SECTIONS])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if invalid := set(args.sections) - SECTIONS.keys():
        parser.error(f"sections: must be of {', '.join(SECTIONS)}, got {', '.join(invalid)}")
    if args.child:
        print(json.dumps(SECTIONS[args.sections[0]].measure(Size(args.small))))
        return
    args.results.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float | str]] = {}
    seconds: dict[str, float] = {}
    for name in args.sections:
        start = time.perf_counter()
        results[name] = run_section(name, args.small)
        seconds[name] = time.perf_counter() - start
        print(name, json.dumps(results[name]), flush=True)
        (args.results / f"{date.today()}-gpu.md").write_text(format_report(results, seconds))


if __name__ == "__main__":
    main()
