"""Generation speed, and profile of a LoRA training step, of an 8B Llama with random weights in bf16 and in NF4.

python scripts/gpu/profile_generation_and_training.py cuda|cpu [--small]
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial

import gpu
import torch
from decode_profile import measure_time_per_call, print_longest_kernels
from torch.profiler import ProfilerActivity, profile

from tunekit.adapters.config import LoRAConfig
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

PROMPT = [1 + i % 50 for i in range(37)]
BATCHES = ((1, 24), (1, 64), (8, 64))  # rows, new tokens of each row
PROFILED_TOKENS, NUM_KERNELS = 32, 10
NUM_WARMUP_STEPS = 3


def generate(model: Decoder, num_rows: int, num_tokens: int) -> None:
    sampling = SamplingConfig(max_new_tokens=num_tokens, temperature=0)
    generate_batch(model, [PROMPT] * num_rows, sampling, frozenset())


def measure_generation(model: Decoder, name: str, device: torch.device) -> None:
    """Print the time per token with and without cuDNN attention, which builds a plan for each new shape."""
    for use_cudnn in (True, False) if device.type == "cuda" else (None,):
        if use_cudnn is not None:
            torch.backends.cuda.enable_cudnn_sdp(use_cudnn)
        for num_rows, num_tokens in BATCHES:
            seconds = measure_time_per_call(partial(generate, model, num_rows, num_tokens), 1, device)
            text = f"{num_tokens} tokens in {seconds:.2f} s, {1e3 * seconds / num_tokens:.1f} ms per token"
            print(f"{name}, cuDNN attention {use_cudnn}, {num_rows} rows: {text}", flush=True)


def print_host_syncs(step: Callable[[], None], name: str) -> None:
    """Print the host synchronizations of a training step, with the lines of code that cause them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    lines = sorted({f"{warning.filename[-40:]}:{warning.lineno}" for warning in caught})
    print(f"{name}: {len(caught)} host synchronizations in a step: {lines[:12]}", flush=True)


def profile_training_step(model: Decoder, name: str, size: gpu.Size) -> None:
    """Print host synchronizations, host time and the longest kernels of a LoRA step."""
    batch = gpu.build_random_batch(model.spec.vocab, *size.tokens(4, 2048))
    step = gpu.build_training_step(model.train(), LoRAConfig(16), batch)
    for _ in range(NUM_WARMUP_STEPS):
        step()
    print_host_syncs(step, name)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    host_time = time.perf_counter() - start
    torch.cuda.synchronize()
    print(f"{name}: host time {host_time:.3f} s, step time {time.perf_counter() - start:.3f} s", flush=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=60), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a small model")
    args = parser.parse_args()
    device, size = torch.device(args.device), gpu.Size(args.small)
    gpu.DEVICE = device
    for quantization in (NoQuantization(), NF4Config()):
        name = type(quantization).__name__
        precision = PrecisionConfig("bf16", master_dtype="fp32", frozen_dtype="bf16")
        model = gpu.build_random_model(
            size.config("tunekit/llama3_1_8b"), quantization, LoRAConfig(16), MemoryConfig(), precision
        )
        measure_generation(model, name, device)
        if device.type == "cuda":
            for num_rows in (1, 8):
                run = partial(generate, model, num_rows, PROFILED_TOKENS)
                print_longest_kernels(
                    run, PROFILED_TOKENS, f"{name}, {num_rows} rows, with the prefill", device, NUM_KERNELS
                )
            profile_training_step(model, name, size)
            del model
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
