"""Generation speed and host waits of a training step, of an 8B Llama with random weights in bf16 and in NF4.

python scripts/gpu/generation.py cuda|cpu [--small]
"""

import argparse
import time
import warnings

import gpu
import torch
from torch.profiler import ProfilerActivity, profile

from tunekit.adapters.config import LoRAConfig
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

PROMPT = [1 + i % 50 for i in range(37)]
CASES = ((1, 24), (1, 64), (8, 64))  # rows and tokens


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def generate(model: Decoder, name: str, device: torch.device) -> None:
    """Tokens per second with and without cuDNN attention, which builds a plan for each new shape."""
    for cudnn in (True, False) if device.type == "cuda" else (None,):
        if cudnn is not None:
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for rows, tokens in CASES:
            synchronize(device)
            start = time.perf_counter()
            generate_batch(model, [PROMPT] * rows, SamplingConfig(max_new_tokens=tokens, temperature=0), frozenset())
            synchronize(device)
            seconds = time.perf_counter() - start
            text = f"{tokens} tokens in {seconds:.2f} s, {1e3 * seconds / tokens:.1f} ms per token"
            print(f"{name} cudnn={cudnn} rows {rows}: {text}", flush=True)


def decode_kernels(model: Decoder, name: str) -> None:
    """The longest kernels of 32 tokens of one row, and of eight."""
    for rows in (1, 8):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            generate_batch(model, [PROMPT] * rows, SamplingConfig(max_new_tokens=32, temperature=0), frozenset())
            torch.cuda.synchronize()
        averages = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)[:10]
        for event in averages:
            milliseconds = event.self_device_time_total / 1e3
            print(f"{name} rows {rows}: {milliseconds:8.2f} ms {event.count:6} calls  {event.key[:90]}", flush=True)


def training_step(model: Decoder, name: str, size: gpu.Size) -> None:
    """Host waits, host time and the longest kernels of a LoRA step."""
    data = gpu.batch(model.spec.vocab, *size.tokens(4, 2048))
    step = gpu.train(model.train(), LoRAConfig(16), data)
    for _ in range(3):
        step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    places = sorted({f"{w.filename[-40:]}:{w.lineno}" for w in caught})
    print(f"{name}: {len(caught)} host waits in a step: {places[:12]}", flush=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    print(f"{name}: host {launched:.3f} s, step {time.perf_counter() - start:.3f} s", flush=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=60), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device, size = torch.device(args.device), gpu.Size(args.small)
    gpu.DEVICE = device
    for weights in (NoQuantization(), NF4Config()):
        name = type(weights).__name__
        precision = PrecisionConfig("bf16", master_dtype="fp32", frozen_dtype="bf16")
        model = gpu.model(size.config("tunekit/llama3_1_8b"), weights, LoRAConfig(16), MemoryConfig(), precision)
        generate(model, name, device)
        if device.type == "cuda":
            decode_kernels(model, name)
            training_step(model, name, size)
            del model
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
