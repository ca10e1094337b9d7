"""Speed and memory of tunekit on a GPU, compared with hardware limits and transformers + peft (+ bitsandbytes), in
twelve minutes.

    python benchmarks/gpu.py [limits dequantize lora qlora full memory vocabulary cuda_graph transformers_steps kernels]
        [--small]

Each section runs as a process with its own time limit, so that one that fails or hangs does not affect the others.
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
import torch.nn.functional as F
from limits import copy_bandwidth, matmul_rates, seconds
from torch import nn

from tunekit import assets
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware
from tunekit.kernels import nf4
from tunekit.kernels.cross_entropy import CrossEntropyTerms, linear_cross_entropy
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder, Head
from tunekit.models.families.registry import find_family
from tunekit.models.linear import Embedding, Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import Attention
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.recipes import sft
from tunekit.training.cuda_graph import graph_backward_pass

BENCHMARKS = Path(__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "head_dim": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
BF16 = torch.bfloat16
PEER_ROWS = 2  # 4 rows of transformers are estimated at 75 GB


@dataclass(frozen=True)
class Size:
    """Sizes of all sections."""

    small: bool

    @property
    def steps(self) -> int:
        return 2 if self.small else 6

    def tokens(self, rows: int, length: int) -> tuple[int, int]:
        return (2, 64) if self.small else (rows, length)

    def config(self, name: str) -> dict:
        """config.json of a preset, or a much smaller one."""
        folder = assets.model_dir(name)
        assert folder is not None
        return read_json(folder / "config.json") | (TINY if self.small else {})


def measure_steps(steps: Callable[[], object], size: Size) -> dict[str, float]:
    """Median step time, all step times, and peak allocated bytes."""
    times = []
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(size.steps):
        start = time.perf_counter()
        steps()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    reserved = torch.cuda.max_memory_reserved() if DEVICE.type == "cuda" else 0
    return {"step": statistics.median(times[size.steps // 3 :]), "first": times[0], "peak": peak, "reserved": reserved}


def model(
    config: dict,
    weights: NoQuantization,
    adapter: NoAdapter | LoRAConfig,
    memory: MemoryConfig,
    precision: PrecisionConfig,
) -> Decoder:
    """Like `build.build_model`, but initialized on the device: on the CPU, 8B parameters take minutes."""
    family, spec = find_family(config, "config.json")
    source = HFCheckpoint(Path(), "random", config, family, spec)
    with torch.device("meta"):
        net = Decoder(source.spec)
    weights.apply(net)
    adapter.apply(net)
    precision.apply(net, {}, DEVICE)
    memory.apply(net, DEVICE)
    net.to_empty(device=DEVICE)
    net.tie()
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, Linear) and ".lora_" not in name:
                module.load_weight(torch.randn(module.out_features, module.in_features, device=DEVICE) * 0.02)
            elif isinstance(module, Embedding):
                module.weight.normal_(std=0.02)
        for parameter in net.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.fill_(1.0)
    adapter.init_weights(net, 0)
    return net


def batch(vocab: int, rows: int, length: int, packed: bool = True) -> Batch:
    """Rows with one document each; packed: with documents of 1/8, 3/8 and 1/2 of a row."""
    tokens = torch.randint(0, vocab, (rows, length), device=DEVICE)
    sizes = [length // 8, 3 * length // 8, length // 2] * rows if packed else [length] * rows
    cu_seqlens = F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()  # on the host, as in a data loader
    positions = torch.cat([torch.arange(n) for n in sizes]).view(rows, length).to(DEVICE)
    return Batch(tokens, tokens.roll(-1, 1), positions, cu_seqlens, rows * length, rows * length)


def train(net: Decoder, adapter: NoAdapter | LoRAConfig, rows: Batch) -> Callable[[], None]:
    """A full step: forward, backward, AdamW."""
    optimizer, loss = AdamWConfig(lr=1e-5).build(adapter.param_groups(net)), CrossEntropy()

    def step() -> None:
        (loss(net, rows) / rows.num_target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def flops(net: Decoder, rows: Batch, factor: int) -> float:
    """FLOPs of a step: 4 or 6 per weight and token, including the head; 6 for adapters; attention within documents."""
    linears = {name: m for name, m in net.named_modules() if isinstance(m, Linear)}
    sizes = {name: m.out_features * m.in_features * (6 if ".lora_" in name else factor) for name, m in linears.items()}
    assert rows.cu_seqlens is not None
    pairs = sum(n * (n + 1) / 2 for n in rows.cu_seqlens.diff().tolist())
    mixers = [layer.mixer for layer in net.spec.layers]
    heads = sum(m.heads * m.head_dim for m in mixers if isinstance(m, Attention))
    return sum(sizes.values()) * rows.tokens.numel() + 3 * 4 * heads * pairs


def steps(
    size: Size, preset: str, weights: NoQuantization, adapter: NoAdapter | LoRAConfig, **options
) -> dict[str, float]:
    """Steps of tunekit with a preset; `options`: rows, length, recompute, factor, packed."""
    config, memory = size.config(preset), MemoryConfig(activation_checkpointing=options.get("recompute", "none"))
    trained = "bf16" if type(adapter) is NoAdapter else "fp32"
    net = model(config, weights, adapter, memory, PrecisionConfig("bf16", master_dtype=trained, frozen_dtype="bf16"))
    rows = batch(net.spec.vocab, *size.tokens(options["rows"], options["length"]), options.get("packed", True))
    results = measure_steps(train(net, adapter, rows), size)
    rate = max(matmul_rates(DEVICE, matmul_sizes(size)).values())
    return results | {"matmul share": flops(net, rows, options["factor"]) / results["step"] / rate}


def matmul_sizes(size: Size) -> tuple[int, ...]:
    return (128, 256) if size.small else (4096, 8192)


# Sections: functions that return values by name


def limits(size: Size) -> dict[str, float]:
    """Copy bandwidth and square bf16 matmuls."""
    rates = {
        f"matmul TFLOP/s, side {side}": rate / 1e12 for side, rate in matmul_rates(DEVICE, matmul_sizes(size)).items()
    }
    return rates | {"copy GB/s, read and written": copy_bandwidth(DEVICE, 2**20 if size.small else 2**31) / 1e9}


def dequantize(size: Size) -> dict[str, float]:
    """4-bit weights to bf16: fraction of the bandwidth of a copy with the same number of bytes. Many calls per
    synchronization.
    """
    out, inner = (256, 128) if size.small else (14336, 8192)
    limit, results = copy_bandwidth(DEVICE, 2**20 if size.small else 2**31), {}
    for nested in (False, True):
        packed, scales = nf4.quantize(torch.randn(out, inner, device=DEVICE))
        codes, outer = nf4.double_quantize(scales) if nested else (scales.view(torch.uint8), None)
        parts = packed.view(out, -1), codes.view(out, -1), None if outer is None else outer.view(torch.uint8)
        spent = repeated(lambda parts=parts: nf4.dequantize(*parts, "nf4", BF16), size)
        moved = packed.numel() + codes.numel() + 2 * out * inner
        name = "nested" if nested else "plain"
        results |= {f"{name} ms": spent * 1e3, f"{name} share of copy": moved / spent / limit}
    if theirs := try_import("bitsandbytes.functional"):
        coded, state = theirs.quantize_4bit(
            torch.randn(out, inner, device=DEVICE, dtype=BF16), quant_type="nf4", blocksize=64
        )
        results["bitsandbytes ms"] = 1e3 * repeated(lambda: theirs.dequantize_4bit(coded, state), size)
    return results


def repeated(fn: Callable[[], object], size: Size) -> float:
    calls = 2 if size.small else 20

    def run_many() -> None:
        for _ in range(calls):
            fn()

    return seconds(run_many, 5, DEVICE) / calls


def lora(size: Size) -> dict[str, float]:
    """Step of an 8B Llama with bf16 weights and rank 16 on all linear layers, 4 rows of 2,048 tokens, then 2 rows, as
    in `transformers_steps`.
    """
    return steps_of_rows(size, NoQuantization())


def qlora(size: Size) -> dict[str, float]:
    """The same with NF4 weights."""
    return steps_of_rows(size, NF4Config())


def steps_of_rows(size: Size, weights: NoQuantization) -> dict[str, float]:
    options = {"length": 2048, "factor": 4, "packed": False}
    results = steps(size, "tunekit/llama3_1_8b", weights, LoRAConfig(16), rows=4, **options)
    gc.collect()
    fewer = steps(size, "tunekit/llama3_1_8b", weights, LoRAConfig(16), rows=PEER_ROWS, **options)
    return results | {f"{PEER_ROWS} rows {key}": value for key, value in fewer.items()}


def full(size: Size) -> dict[str, float]:
    """All weights of a 1B Llama in bf16, 8,192 packed tokens."""
    return steps(size, "tunekit/llama3_2_1b", NoQuantization(), NoAdapter(), rows=4, length=2048, factor=6)


def memory(size: Size) -> dict[str, float]:
    """8B QLoRA at 2 x 2,048 with double quantization and full activation checkpointing."""
    options = {"rows": 2, "length": 2048, "recompute": "full", "factor": 4}
    return steps(size, "tunekit/llama3_1_8b", NF4Config(True), LoRAConfig(16), **options)


def vocabulary(size: Size) -> dict[str, float]:
    """Memory of head and loss in addition to the head's weight, relative to the vocabulary size."""
    tokens, dim = (64, 64) if size.small else (8192, 4096)
    results = {}
    for vocab in (512, 1024) if size.small else (32768, 65536, 131072, 262144):
        config = size.config("tunekit/llama3_1_8b") | {"vocab_size": vocab, "hidden_size": dim}
        spec = replace(find_family(config, "config.json")[1], vocab=vocab, dim=dim)
        head = Head(spec).to(DEVICE, BF16).requires_grad_(False)
        hidden = torch.randn(tokens, dim, device=DEVICE, dtype=BF16, requires_grad=True)
        targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
        before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
        found_here = measure_steps(lambda h=hidden, t=targets, head=head: loss(h, t, head), size)
        results[f"GB at {vocab:,}"] = (found_here["peak"] - before) / 1e9
        results[f"ms at {vocab:,}"] = found_here["step"] * 1e3
        del head, hidden
        gc.collect()
    return results


def loss(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> None:
    hidden.grad = None
    linear_cross_entropy(hidden, targets, head, CrossEntropyTerms()).backward()


def cuda_graph(size: Size) -> dict[str, float]:
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
    """Results of `measure_steps` after twice as many steps, in which most shapes have been captured."""
    adapter = LoRAConfig(16)
    precision = PrecisionConfig("bf16", master_dtype="fp32", frozen_dtype="bf16")
    net = model(size.config(preset), NoQuantization(), adapter, MemoryConfig(), precision)
    cfg = sft.SFTConfig(model=preset, data=TextDataset(preset), output_dir=preset, cuda_graph=use_graphs)
    optimizer = AdamWConfig(lr=1e-5).build(adapter.param_groups(net))
    with DistributedContext(0, DEVICE.type) as dist:
        run_pass = partial(sft.backward_pass, net, cfg, dist)
        if use_graphs:
            run_pass = graph_backward_pass(run_pass, net, dist)
        sizes = net.spec.vocab, *size.tokens(rows, 2048)
        batches = iter([random_documents(*sizes, seed) for seed in range(3 * size.steps)])

        def step() -> None:
            sft.forward_backward(net, [next(batches)], cfg, dist, run_pass)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2 * size.steps):
            step()
        return measure_steps(step, size)


def random_documents(vocab: int, rows: int, length: int, seed: int) -> Batch:
    """Packed rows of documents of 40 to 600 tokens; half of the tokens are targets. On the CPU, as in a data loader."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = []
    for _ in range(rows):
        left = length
        while left:
            sizes.append(min(left, draw.randint(40, 600)))
            left -= sizes[-1]
    tokens = torch.randint(0, vocab, (rows, length), generator=generator)
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(tokens.shape, generator=generator) < 0.5, IGNORE)
    cu_seqlens = F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(n) for n in sizes]).view(rows, length)
    return Batch(tokens, targets, positions, cu_seqlens, int((targets != IGNORE).sum()), tokens.numel())


def transformers_steps(size: Size) -> dict[str, float]:
    """transformers + peft in the same step, without and with the kernels of Liger: 2 rows with one document each, for
    which SDPA needs no mask.
    """
    cases: dict[str, str | None] = {"lora": None}
    if try_import("bitsandbytes"):
        cases["qlora"] = "nf4"
    results = {}
    for kernels in ("", "liger ") if try_import("liger_kernel") else ("",):
        if kernels:
            importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
        for name, four in cases.items():
            results |= run_transformers(size, four, kernels + name)
            gc.collect()
    return results


def run_transformers(size: Size, four: str | None, name: str) -> dict[str, float]:
    transformers, peft = (importlib.import_module(module) for module in ("transformers", "peft"))
    config = transformers.LlamaConfig(**size.config("tunekit/llama3_1_8b"))
    with torch.device(DEVICE):
        torch.set_default_dtype(BF16)
        net = transformers.LlamaForCausalLM(config).to(BF16)
        torch.set_default_dtype(torch.float32)
    if four:
        quantize_bitsandbytes(net)
    lora_config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    net = peft.get_peft_model(net, lora_config)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, size.tokens(PEER_ROWS, 2048), device=DEVICE)
    net.train()

    def step() -> None:
        with torch.autocast(DEVICE.type, BF16):
            net(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {f"{name} {key}": value for key, value in measure_steps(step, size).items()}


def quantize_bitsandbytes(net: nn.Module) -> None:
    """Replace the linear layers of the blocks by bitsandbytes 4-bit layers."""
    modules = importlib.import_module("bitsandbytes.nn")
    for name, layer in list(net.named_modules()):
        if isinstance(layer, nn.Linear) and ".layers." in name:
            quantized = modules.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=BF16, quant_type="nf4"
            )
            quantized.weight = modules.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            owner, _, leaf = name.rpartition(".")
            setattr(net.get_submodule(owner), leaf, quantized.to(DEVICE))


def kernels(size: Size) -> dict[str, float]:
    """All tests that need a GPU."""
    pytest_args = ["-k", "nf4", "--collect-only"] if size.small else []
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    line += ["tests/unit/kernels", *pytest_args]
    done = subprocess.run(line, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], file=sys.stderr)
    last = [text for text in done.stdout.splitlines() if text.strip()][-1:]
    return {f"exit {done.returncode}: {' '.join(last)}": done.returncode}


def try_import(name: str) -> Any:
    """Import a module if its package is installed, else None."""
    return importlib.import_module(name) if importlib.util.find_spec(name.partition(".")[0]) else None


# Time limits in seconds: twelve minutes in total
SECTIONS: dict[Callable[[Size], dict[str, float]], int] = {
    limits: 40,
    dequantize: 40,
    lora: 90,
    qlora: 90,
    full: 60,
    memory: 80,
    vocabulary: 40,
    cuda_graph: 60,
    transformers_steps: 180,
    kernels: 120,
}


def run_section(name: str, timeout: int, small: bool) -> dict[str, float | str]:
    """Run a section in its own process; the result contains the reason if it failed."""
    line = [sys.executable, __file__, name, "--inside", *(["--small"] if small else [])]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"fault": f"not done in {timeout} s"}
    lines = [text for text in done.stderr.splitlines() if text.strip()]
    if done.returncode:
        return {"fault": " / ".join(lines[-3:])[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def format_page(results: dict[str, dict[str, float | str]], spent: dict[str, float]) -> str:
    """All results as Markdown, compared with the targets."""
    text = f"# On {describe_hardware(DEVICE)}, {date.today()}\n\n"
    text += f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}. "
    text += "All weights are random.\n"
    lora_step, qlora_step = (results.get(name, {}).get("step") for name in ("lora", "qlora"))
    if isinstance(lora_step, float) and isinstance(qlora_step, float):
        text += f"\nA step of QLoRA takes {qlora_step / lora_step:.3f} x one of LoRA.\n"
    for name, values in results.items():
        doc = next(s.__doc__ for s in SECTIONS if s.__name__ == name) or ""
        text += f"\n## {name}\n\n{doc} ({spent[name]:.0f} s in all)\n\n| | |\n|---|---|\n"
        text += "".join(f"| {key} | {format_value(key, value)} |\n" for key, value in values.items())
    return text


def format_value(key: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if key.endswith(("peak", "reserved")):
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.4g}"


def main() -> None:
    names = {function.__name__: function for function in SECTIONS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=[*names])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if wrong := set(args.sections) - names.keys():
        parser.error(f"{', '.join(wrong)}: none of {', '.join(names)}")
    if args.inside:
        print(json.dumps(names[args.sections[0]](Size(args.small))))
        return
    args.results.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float | str]] = {}
    spent: dict[str, float] = {}
    for name in args.sections:
        start = time.perf_counter()
        results[name] = run_section(name, SECTIONS[names[name]], args.small)
        spent[name] = time.perf_counter() - start
        print(name, json.dumps(results[name]), flush=True)
        (args.results / f"{date.today()}-gpu.md").write_text(format_page(results, spent))


if __name__ == "__main__":
    main()
