"""Time of training steps of a 1B model, next to the limits of the device, which are measured first.

A step cannot be faster than its operations over the rate of a matrix product, nor than the bytes that it reads and
writes over the memory bandwidth.
"""

import gc
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from tunekit import assets, devices, env_info
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.data.dataloader.batch import Batch
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.selftest.context import Context
from tunekit.selftest.hardware_limits import Limits, measure_limits, measure_seconds
from tunekit.selftest.nano import packing, random_documents
from tunekit.selftest.random_step import build_random_model, build_training_step, count_bytes, count_operations
from tunekit.selftest.result import CheckSkippedError, Result

PRESET = "tunekit/llama3_2_1b"
GPU_ROWS = ((4, 2048), (2, 2048), (1, 2048), (1, 512))  # rows and their length; the first that fits in memory counts
CPU_TOKENS = (128, 64, 32, 16)  # the first whose operations take at most CPU_SECONDS at the measured rate
CPU_SECONDS = 2.0
CPU_LAYERS = 2  # of 16: the time of all layers is scaled by their operations
ROUNDS, SLOW = 3, 2.0  # timed steps; a step of more seconds is timed once
HEADROOM = 1.3  # of the memory that a model and its optimizer need


@dataclass(frozen=True)
class Method:
    """A way of training: how frozen weights are stored, and what is trained."""

    weights: NoQuantization
    adapter: NoAdapter | LoRAConfig


class Step(NamedTuple):
    """A training step."""

    seconds: float
    operations: float
    bytes: float
    peak: int  # bytes of GPU memory


def check_limits(context: Context) -> Result:
    """The limits that the steps are compared with."""
    limits = measure_limits(context.device)
    dtype = str(limits.dtype).removeprefix("torch.")
    values = {"operations_per_second": limits.rate, "bytes_per_second": limits.bandwidth, "dtype": dtype}
    copy = f"memory {limits.bandwidth / 1e9:,.3g} GB/s (copy: bytes read and written)"
    return Result(f"{copy}; {dtype} matrix products {format_rate(limits.rate)}", values)


def check_step(method: Method, context: Context) -> Result:
    """Forward, backward and AdamW of a packed batch."""
    limits, spec = measure_limits(context.device), model_spec()
    if context.device.type == "cpu":
        return check_on_cpu(method, context, limits, spec)
    for rows, length in GPU_ROWS:
        try:
            step = measure_step(method, spec, (rows, length), context)
        except torch.OutOfMemoryError:
            gc.collect()
            devices.empty_cache(context.device)
            continue
        return report_step(step, limits, {"layers": len(spec.layers), "tokens": rows * length})
    raise CheckSkippedError(f"not enough GPU memory for {GPU_ROWS[-1][1]} tokens")


def check_on_cpu(method: Method, context: Context, limits: Limits, spec: DecoderSpec) -> Result:
    """A step of a model with fewer layers."""
    smaller, total = replace(spec, layers=spec.layers[:CPU_LAYERS]), len(spec.layers)
    states = 4 if isinstance(method.adapter, NoAdapter) else 1  # weights, gradients and two moments
    needed = HEADROOM * states * limits.dtype.itemsize * sum(p.numel() for p in meta_model(smaller).parameters())
    available = env_info.available_memory()
    if available is not None and available < needed:
        raise CheckSkippedError(f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available")
    fast = (n for n in CPU_TOKENS if operations_of(method, smaller, n) <= CPU_SECONDS * limits.rate)
    tokens = next(fast, CPU_TOKENS[-1])
    step = measure_step(method, smaller, (1, tokens), context)
    scaled = step.seconds * operations_of(method, spec, tokens) / step.operations
    values = {"layers": CPU_LAYERS, "tokens": tokens, "scaled_layers": total, "scaled_seconds": scaled}
    note = f"{CPU_LAYERS} of {total} layers; with all of them about {scaled:.3g} s (scaled by operations), "
    return report_step(step, limits, values, note)


def operations_of(method: Method, spec: DecoderSpec, tokens: int) -> float:
    """Operations of a step of one row."""
    model = meta_model(spec)
    method.adapter.apply(model)
    return count_operations(model, build_batch(spec.vocab, 1, tokens))


def report_step(step: Step, limits: Limits, values: dict[str, Any], note: str = "") -> Result:
    """Format a step: the limit first, then the measurement, and the tokens per second of the model with all layers."""
    compute, memory = step.operations / limits.rate, step.bytes / limits.bandwidth
    limit, tokens = max(compute, memory), values["tokens"]
    rate = tokens / values.get("scaled_seconds", step.seconds)
    peak = f", peak {step.peak / 2**30:.1f} GiB" if step.peak else ""
    detail = (
        f"limit {limit:.3g} s (operations {compute:.3g} s, memory {memory:.3g} s); measured {step.seconds:.3g} s "
        f"= {step.seconds / limit:.2f} x the limit; {note}{rate:,.{0 if rate >= 10 else 1}f} tokens/s "
        f"at {tokens:,} tokens{peak}"
    )
    values |= {"limit_seconds": limit, "operations": step.operations, "bytes": step.bytes}
    values |= {"seconds": step.seconds, "tokens_per_second": rate, "peak_bytes": step.peak}
    return Result(detail, values)


def format_rate(rate: float) -> str:
    """Operations a second in units that suit a CPU, too."""
    return f"{rate / 1e12:,.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.3g} GFLOP/s"


def model_spec() -> DecoderSpec:
    return find_family(read_json(assets.PRESETS[PRESET] / "config.json"), "config.json")[1]


def measure_step(method: Method, spec: DecoderSpec, shape: tuple[int, int], context: Context) -> Step:
    """Time, operations and bytes of a step of a model with random weights."""
    device = context.device
    if devices.device_capabilities(device).memory_stats:
        torch.get_device_module(device).reset_peak_memory_stats(device)
    model = build_model(method, spec, device)
    batch = build_batch(spec.vocab, *shape).to(device)
    step = build_training_step(model, method.adapter, batch)
    seconds = statistics.median(measure_seconds(step, ROUNDS, device, SLOW))
    peak = devices.peak_memory(device) or 0
    return Step(seconds, count_operations(model, batch), count_bytes(model), peak)


def build_model(method: Method, spec: DecoderSpec, device: torch.device) -> Decoder:
    """A model with random weights in the precision of recipes."""
    dtype = "bf16" if devices.has_fast_bf16(device) else "fp32"
    precision = PrecisionConfig("auto", dtype if isinstance(method.adapter, NoAdapter) else "fp32", dtype)
    return build_random_model(spec, method.weights, method.adapter, MemoryConfig(), precision, device).train()


def meta_model(spec: DecoderSpec) -> Decoder:
    with torch.device("meta"):
        return Decoder(spec)


def build_batch(vocab: int, rows: int, length: int) -> Batch:
    """Packed rows of three documents each, whose tokens are all trained on."""
    lengths = [length // 8, 3 * length // 8, length // 2] * rows
    documents = random_documents(vocab, lengths, trained=1.0)
    return packing(length, rows).collate_rows([documents[i : i + 3] for i in range(0, len(documents), 3)])[0]


FUNCTIONS = {
    "limits": check_limits,
    "lora_step": partial(check_step, Method(NoQuantization(), LoRAConfig(16))),
    "qlora_step": partial(check_step, Method(NF4Config(), LoRAConfig(16))),
    "full_step": partial(check_step, Method(NoQuantization(), NoAdapter())),
}
