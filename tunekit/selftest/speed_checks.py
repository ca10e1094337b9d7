"""Time of training steps of a 1B model, next to the limits of the device, which are measured first.

A step cannot be faster than its operations over the rate of a matrix product, nor than the bytes that it reads and
writes over the memory bandwidth.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit import assets, devices, env_info
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.data.dataloader.batch import Batch
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.linear import Embedding, Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import Attention, DecoderSpec
from tunekit.optim.config import AdamWConfig
from tunekit.plan.step_time import linear_flops
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.selftest.context import Context, synchronize
from tunekit.selftest.nano import packing, random_documents
from tunekit.selftest.result import CheckSkippedError, Result

PRESET = "tunekit/llama3_2_1b"
SIDES = {"cuda": (4096, 8192), "cpu": (1024, 2048)}  # of square matrices
COPIED = {"cuda": 2**30, "cpu": 2**28}  # bytes, beyond every cache
GPU_ROWS = ((4, 2048), (2, 2048), (1, 2048), (1, 512))  # rows and their length; the first that fits in memory counts
CPU_TOKENS = (128, 64, 32, 16)  # the first whose operations take at most CPU_SECONDS at the measured rate
CPU_SECONDS = 2.0
CPU_LAYERS = 2  # of 16: the time of all layers is scaled by their operations
ROUNDS, SLOW = 3, 2.0  # timed steps; a step of more seconds is timed once
HEADROOM = 1.3  # of the memory that a model and its optimizer need
NOISE = 2**20  # random numbers that are repeated to fill weights: to draw a billion takes seconds


@dataclass(frozen=True)
class Method:
    """A way of training: how frozen weights are stored, and what is trained."""

    weights: NoQuantization
    adapter: NoAdapter | LoRAConfig


class Limits(NamedTuple):
    """Measured rates of the device."""

    rate: float  # operations a second of the fastest matrix product
    bandwidth: float  # bytes a second of a copy, read and written
    dtype: torch.dtype


class Step(NamedTuple):
    """A training step."""

    seconds: float
    operations: float
    bytes: float
    peak: int  # bytes of GPU memory


def measure_time(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median time after a round that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
        if times[0] > SLOW and len(times) == 2:
            break
    return statistics.median(times[1:])


@cache
def measure_limits(device: torch.device) -> Limits:
    """The rate of matrix products in the dtype of training, and the bandwidth of the memory."""
    dtype = torch.bfloat16 if devices.has_fast_bf16(device) else torch.float32
    rates = []
    for side in SIDES.get(device.type, SIDES["cpu"]):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        rates.append(2 * side**3 / measure_time(partial(torch.mm, a, b), device, 5))
    size = COPIED.get(device.type, COPIED["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return Limits(max(rates), 2 * size / measure_time(partial(target.copy_, source), device, 5), dtype)


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
    if devices.capabilities(device).memory_stats:
        torch.get_device_module(device).reset_peak_memory_stats(device)
    model = build_model(method, spec, device)
    batch = build_batch(spec.vocab, *shape).to(device)
    optimizer, loss = AdamWConfig(lr=1e-5).build(method.adapter.param_groups(model)), CrossEntropy()

    def train() -> None:
        (loss(model, batch) / batch.num_target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = measure_time(train, device, ROUNDS)
    peak = devices.peak_memory(device) or 0
    return Step(seconds, count_operations(model, batch), count_bytes(model), peak)


def meta_model(spec: DecoderSpec) -> Decoder:
    with torch.device("meta"):
        return Decoder(spec)


def build_model(method: Method, spec: DecoderSpec, device: torch.device) -> Decoder:
    """Build a model as recipes do, with random numbers instead of a checkpoint."""
    model = meta_model(spec)
    method.weights.apply(model)
    method.adapter.apply(model)
    dtype = "bf16" if devices.has_fast_bf16(device) else "fp32"
    PrecisionConfig("auto", dtype if isinstance(method.adapter, NoAdapter) else "fp32", dtype).apply(model, {}, device)
    MemoryConfig().apply(model, device)
    model.to_empty(device=device)
    model.tie()
    noise = torch.randn(NOISE, device=device) * 0.02
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Linear) and ".lora_" not in name:
                module.load_weight(repeat_to(noise, module.out_features, module.in_features))
            elif isinstance(module, Embedding):
                module.weight.copy_(repeat_to(noise, *module.weight.shape))
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.fill_(1.0)
    method.adapter.init_weights(model, 0)
    return model.train()


def repeat_to(noise: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape that repeats some numbers."""
    count = torch.Size(shape).numel()
    return noise.repeat(-(-count // len(noise)))[:count].view(shape)


def build_batch(vocab: int, rows: int, length: int) -> Batch:
    """Packed rows of three documents each, whose tokens are all trained on."""
    lengths = [length // 8, 3 * length // 8, length // 2] * rows
    documents = random_documents(vocab, lengths, trained=1.0)
    return packing(length, rows).collate_rows([documents[i : i + 3] for i in range(0, len(documents), 3)])[0]


def count_operations(model: Decoder, batch: Batch) -> float:
    """4 operations per frozen weight and token, 6 per trained one, and attention within documents."""
    assert batch.cu_seqlens is not None
    lengths = batch.cu_seqlens.diff().double()
    pairs = float((lengths * (lengths + 1) / 2).sum())
    mixers = [layer.mixer for layer in model.spec.layers]
    channels = sum(m.heads * m.head_dim for m in mixers if isinstance(m, Attention))
    return sum(linear_flops(model, 1)) * batch.tokens.numel() + 3 * 4 * channels * pairs


def count_bytes(model: Decoder) -> float:
    """Weights are read forward and backward; those that are trained have a gradient and two moments, and change."""
    parameters = [*model.parameters()]
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    return 2 * sum(p.nbytes for p in parameters) + 8 * trained


FUNCTIONS = {
    "limits": check_limits,
    "lora_step": partial(check_step, Method(NoQuantization(), LoRAConfig(16))),
    "qlora_step": partial(check_step, Method(NF4Config(), LoRAConfig(16))),
    "full_step": partial(check_step, Method(NoQuantization(), NoAdapter())),
}
