"""Launches of every Triton kernel of tunekit: all variants, the largest tensors, and training steps.

`LAUNCHES` lists the launches of each kernel module. A new `kernels/<name>_triton.py` needs an entry.
`triton_compile.py` compiles the records; `tests/gpu/test_triton_compiles.py` checks the results.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from preset_shapes import read_preset_shapes
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton_launch_recorder import Launch, empty_meta, record_launches

from tunekit.kernels import (
    adamw8bit_triton,
    cross_entropy_triton,
    float8_triton,
    glu_triton,
    grouped_mm_triton,
    kl_divergence_triton,
    nf4_matmul_triton,
    nf4_triton,
    probe_triton,
    rms_norm_triton,
    rope_triton,
)
from tunekit.kernels.adamw8bit import AdamWHyperparams, Moments

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ACTIVATION_DTYPES = CHECKPOINT_DTYPES = (BF16, FP16, FP32)
NUM_TOKENS = 2048
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
SHAPES = read_preset_shapes()


# Launches of one kernel module: each function below calls a launcher


def launch_glu(shape: tuple[int, int], act: str, dtype: torch.dtype = BF16, stride: int | None = None) -> None:
    """Forward and backward pass, on contiguous rows or on slices of wider rows."""
    rows, dim = shape
    x = empty_meta(rows, stride or dim, dtype=dtype)[:, :dim]
    y = empty_meta(rows, dim, dtype=dtype)
    glu_triton.forward(x, x, y, act)
    glu_triton.backward(y, x, x, y, y, act)


def launch_glu_variants() -> None:
    for dim in sorted(SHAPES.mlp_dims):
        for act in ACTIVATIONS:
            for dtype in ACTIVATION_DTYPES:
                launch_glu((1, NUM_TOKENS * dim), act, dtype)
                launch_glu((NUM_TOKENS, dim), act, dtype, 2 * dim)  # of a fused projection
                launch_glu((1, 7), act, dtype)


def launch_rms_norm(  # noqa: PLR0913 (one argument per property of a norm)
    rows: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    scale_in_fp32: bool,
    stride: int = 0,
    train_weight: bool = True,
) -> None:
    dtype, weight_dtype = dtypes
    x = empty_meta(rows, stride or dim, dtype=dtype)[:, :dim]
    y, rstd = empty_meta(rows, dim, dtype=dtype), empty_meta(rows, dtype=FP32)
    weight = None if weight_dtype is None else empty_meta(dim, dtype=weight_dtype)
    partial_sums = empty_meta(-(-rows // 64) if train_weight and weight is not None else 0, dim, dtype=FP32)
    rms_norm_triton.forward(x, weight, y, rstd, 1e-6, 0.0, scale_in_fp32)
    rms_norm_triton.backward(y, x, weight, rstd, y, partial_sums, 0.0, scale_in_fp32)


def launch_rms_norm_variants() -> None:
    pairs = [(a, b) for a in ACTIVATION_DTYPES for b in (a, FP32, None)]
    for dim in sorted(SHAPES.norm_dims | {100}):
        for dtypes in dict.fromkeys(pairs):
            for scale_in_fp32 in (False, True) if dtypes[1] else (False,):
                launch_rms_norm(NUM_TOKENS, dim, dtypes, scale_in_fp32)
                launch_rms_norm(NUM_TOKENS, dim, dtypes, scale_in_fp32, train_weight=False)


def launch_rope(
    shape: tuple[int, int, int],
    rope_dim: int,
    interleaved: tuple[bool, bool],
    rotate_last: bool,
    dtype: torch.dtype = BF16,
) -> None:
    x, table = empty_meta(*shape, dtype=dtype), empty_meta(shape[0], rope_dim // 2, dtype=FP32)
    rope_triton.rotate(x, x, table, table, shape[2] - rope_dim if rotate_last else 0, 1.0, *interleaved)


def launch_rope_variants() -> None:
    for num_heads, head_dim, rope_dim in sorted(SHAPES.heads):
        for interleaved in ((False, False), (True, True), (True, False), (False, True)):
            for dtype in ACTIVATION_DTYPES:
                for rotate_last in (False, True):
                    launch_rope((NUM_TOKENS, num_heads, head_dim), rope_dim, interleaved, rotate_last, dtype)


def launch_cross_entropy(rows: int, vocab: int, softcap: float, dtype: torch.dtype = BF16) -> None:
    """Losses of evaluation and of both kinds of training, and entropies."""
    logits, targets = empty_meta(rows, vocab, dtype=dtype), empty_meta(rows, dtype=torch.int64)
    terms = [1.0, softcap, 0.0, 0.0]
    cross_entropy_triton.token_losses(logits, targets, None, terms, False)
    cross_entropy_triton.token_losses(logits, targets, None, terms, True)
    cross_entropy_triton.token_losses(logits, targets, empty_meta(rows, dtype=FP32), terms, True)
    cross_entropy_triton.token_entropies(logits, terms)


def launch_cross_entropy_variants() -> None:
    for vocab in sorted(SHAPES.vocab_sizes | {1000}):
        for softcap in (0.0, 30.0):
            for dtype in ACTIVATION_DTYPES:
                launch_cross_entropy(64, vocab, softcap, dtype)


def launch_adamw8bit(count: int, row: int | None, dtype: torch.dtype = BF16, step: int = 3) -> None:
    blocks = -(-count // 256) if row is None else count // row * -(-row // 256)
    code = empty_meta(count, dtype=torch.uint8)
    x, moments = empty_meta(count, dtype=dtype), Moments(code, code, empty_meta(2, blocks, dtype=FP32), row)
    adamw8bit_triton.step(x, x, moments, AdamWHyperparams(1e-3, 0.1, (0.9, 0.95), 1e-8, step))


def launch_adamw8bit_variants() -> None:
    for dtype in ACTIVATION_DTYPES:
        for rows, row in ((64, 4096), (64, 100), (64, 1), (1, 256)):
            launch_adamw8bit(rows * row, row, dtype)


def empty_nf4_weight(out: int, width: int, double_quant: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed values, scales and outer scales of a weight (out, width)."""
    scales = empty_meta(out, width // 64 * (1 if double_quant else 4), dtype=torch.uint8)
    outer_scales = empty_meta(4 * (-(-out * width // 64 // 256) + 1), dtype=torch.uint8) if double_quant else None
    return empty_meta(out, width // 2, dtype=torch.uint8), scales, outer_scales


def launch_nf4(out: int, width: int, double_quant: bool, dtype: torch.dtype = BF16) -> None:
    tables = empty_meta(16, dtype=FP32), empty_meta(256, dtype=FP32)
    nf4_triton.dequantize(*empty_nf4_weight(out, width, double_quant), *tables, dtype)


def launch_nf4_matmul(
    rows: int,
    out: int,
    width: int,
    double_quant: bool,
    dtype: torch.dtype = BF16,
    bias: bool = False,
    kind: str = "nf4",
) -> None:
    tables = empty_meta(16, dtype=FP32), empty_meta(256, dtype=FP32)
    x, b = empty_meta(rows, width, dtype=dtype), empty_meta(out, dtype=dtype) if bias else None
    nf4_matmul_triton.matmul_fused(x, empty_nf4_weight(out, width, double_quant), kind, *tables, b)


def launch_nf4_quantize(count: int, dtype: torch.dtype = BF16) -> None:
    nf4_triton.quantize(empty_meta(count, dtype=dtype), empty_meta(15, dtype=FP32), empty_meta(16, dtype=torch.uint8))


def launch_nf4_variants() -> None:
    for double_quant in (False, True):
        for dtype in CHECKPOINT_DTYPES:
            launch_nf4(4096, 4096, double_quant, dtype)
    for dtype in CHECKPOINT_DTYPES:
        for count in (4096 * 4096, 64 * 77, 64 * 77 + 16, 1001):
            launch_nf4_quantize(count, dtype)


def launch_nf4_matmul_variants() -> None:
    for dtype in (BF16, torch.float16):
        for rows in (1, 8):
            for double_quant in (False, True):
                launch_nf4_matmul(rows, 4096, 4096, double_quant, dtype)
            launch_nf4_matmul(rows, 4096, 4096, True, dtype, bias=True)
            launch_nf4_matmul(rows, 4096, 4096, True, dtype, kind="fp4")


def launch_float8(blocks: int, dtype: torch.dtype = BF16) -> None:
    float8_triton.dequantize(empty_meta(blocks, 64, dtype=torch.uint8), empty_meta(blocks, dtype=FP32), dtype)


def launch_float8_variants() -> None:
    for dtype in CHECKPOINT_DTYPES:
        for blocks in (4096 * 64, 77, 1):
            launch_float8(blocks, dtype)


Mixture = tuple[float, float, float, float]  # weight and skew of the forward KL divergence, and of the reverse one
FORWARD, REVERSE, BOTH, SKEWED = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.5, 0.0, 0.5, 0.0), (0.5, 0.1, 0.5, 0.1)
MIXTURES = (FORWARD, REVERSE, BOTH, SKEWED, (1.0, 0.1, 0.0, 0.0), (0.0, 0.0, 1.0, 0.1))


def launch_kl_divergence(  # noqa: PLR0913 (one argument per property of a divergence)
    rows: int,
    vocab: int,
    mixture: Mixture,
    caps: tuple[float, float] = (0.0, 0.0),
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    gradient: bool = True,
) -> None:
    """Divergence from a teacher with a smaller vocabulary."""
    parameters = [1.0, caps[0], 1.0, caps[1], 2.0, *mixture, 1.0]
    student, teacher = empty_meta(rows, vocab, dtype=dtypes[0]), empty_meta(rows, vocab - 8, dtype=dtypes[1])
    kl_divergence_triton.divergences(student, teacher, parameters, vocab - 8, gradient)


def launch_kl_divergence_variants() -> None:
    for vocab in sorted(SHAPES.vocab_sizes | {100, 1000}):
        for mixture in MIXTURES:
            launch_kl_divergence(64, vocab, mixture)
        launch_kl_divergence(64, vocab, FORWARD, gradient=False)
        launch_kl_divergence(64, vocab, SKEWED, gradient=False)
        launch_kl_divergence(64, vocab, BOTH, (30.0, 0.0), (BF16, FP32))
        launch_kl_divergence(64, vocab, REVERSE, (0.0, 30.0), (FP32, BF16))
        launch_kl_divergence(64, vocab, SKEWED, (30.0, 30.0), (FP32, FP32), gradient=False)
        launch_kl_divergence(64, vocab, SKEWED, (30.0, 30.0))


def launch_grouped_mm(rows: int, num_experts: int, width: int, inner: int, expert_rows: int = 0) -> None:
    """Matmuls of `x` (rows, inner) with weights (num_experts, width, inner): forward, and gradients of both.

    `expert_rows`: rows between the starts of two experts, if weights are slices of larger tensors.
    """
    x, y, ends = empty_meta(rows, inner), empty_meta(rows, width), empty_meta(num_experts, dtype=torch.int32)
    weight = empty_meta(num_experts, expert_rows or width, inner)[:, :width]
    grouped_mm_triton.grouped_product(x, weight.mT, ends)
    grouped_mm_triton.grouped_product(y, weight, ends)
    grouped_mm_triton.grouped_outer(y, x, ends)
    grouped_mm_triton.grouped_outer(y, empty_meta(rows, 8), ends)  # gradients of biases: matmuls with ones


def launch_grouped_mm_variants() -> None:
    for num_experts in (8, 128, 512):
        launch_grouped_mm(NUM_TOKENS, num_experts, 1536, 4096)
        launch_grouped_mm(NUM_TOKENS, num_experts, 520, 1000)  # multiples of 8 and not of 16


# The largest tensors: more than 2^31 elements, or larger offsets


def launch_glu_large() -> None:
    for act in ACTIVATIONS:
        launch_glu((1, 2**31 - 1), act)
        launch_glu((1, 2**31 + 512), act)
        launch_glu((2**18, 18432), act, stride=2 * 18432)


def launch_rms_norm_large() -> None:
    launch_rms_norm(2**18, 16384, (BF16, BF16), scale_in_fp32=False)
    launch_rms_norm(2**15, 128, (BF16, BF16), scale_in_fp32=False, stride=2**17)


def launch_rope_large() -> None:
    for interleaved in ((False, False), (True, True)):
        launch_rope((2**18, 128, 128), 128, interleaved, rotate_last=False)
    heads = empty_meta(128, 2**17, 256).transpose(0, 1)  # the stride of heads is larger than that of tokens
    table = empty_meta(2**17, 128, dtype=FP32)
    rope_triton.rotate(heads, empty_meta(2**17, 128, 256), table, table, 0, 1.0, False, False)


def launch_cross_entropy_large() -> None:
    launch_cross_entropy(8192, 262144, 0.0)
    launch_cross_entropy(8192 + 64, 262144 + 1, 30.0)


def launch_adamw8bit_large() -> None:
    launch_adamw8bit(2**18 * 16384, 16384, step=2**20)
    launch_adamw8bit(2**32, None)
    launch_adamw8bit(2**31 - 1, None)


def launch_nf4_large() -> None:
    for double_quant in (False, True):
        launch_nf4(2**15 + 2**14, 2**16, double_quant)  # 1.6e9 bytes, which fit an int32; twice the number does not
        launch_nf4(2**17, 2**16, double_quant)
    for count in (2**31 - 64, 2**31 - 1, 2**33, 2**33 + 7):
        launch_nf4_quantize(count)


def launch_nf4_matmul_large() -> None:
    for double_quant in (False, True):
        launch_nf4_matmul(8, 2**17, 2**16, double_quant)


def launch_float8_large() -> None:
    launch_float8(2**25 - 1)
    launch_float8(2**31 + 32)


def launch_kl_divergence_large() -> None:
    for mixture in MIXTURES:
        launch_kl_divergence(8192 + 64, 262144, mixture, (30.0, 0.0))
    launch_kl_divergence(8192 + 64, 262144 + 1, SKEWED)


def launch_grouped_mm_large() -> None:
    launch_grouped_mm(2**19, 64, 8192, 4096)  # activations, and weights of all experts
    launch_grouped_mm(2**18, 8, 2**16, 2**16)  # weights of one expert
    launch_grouped_mm(2**18, 8, 2**15, 2**15, expert_rows=2**17)


# Training steps, which differ in the number of tokens and the step number


def launch_glu_step(tokens: int, step: int) -> None:
    launch_glu((1, tokens * 11008), "silu")


def launch_rms_norm_step(tokens: int, step: int) -> None:
    launch_rms_norm(tokens, 4096, (BF16, BF16), scale_in_fp32=False)
    launch_rms_norm(tokens, 4096, (BF16, BF16), scale_in_fp32=False, train_weight=False)


def launch_rope_step(tokens: int, step: int) -> None:
    launch_rope((tokens, 32, 128), 128, (False, False), rotate_last=False)


def launch_cross_entropy_step(tokens: int, step: int) -> None:
    launch_cross_entropy(tokens, 49155, 0.0)


def launch_adamw8bit_step(tokens: int, step: int) -> None:
    launch_adamw8bit(64 * 4096, 4096, step=step)


def launch_nf4_step(tokens: int, step: int) -> None:
    launch_nf4(
        64 + tokens % 7, 4096, double_quant=True
    )  # weights of different sizes, as those of experts and projections
    launch_nf4_quantize((64 + tokens % 7) * 4096)


def launch_nf4_matmul_step(tokens: int, step: int) -> None:
    launch_nf4_matmul(1, 4096 + 64 * (tokens % 7), 4096, double_quant=True)


def launch_float8_step(tokens: int, step: int) -> None:
    launch_float8((64 + tokens % 7) * 64)


def launch_kl_divergence_step(tokens: int, step: int) -> None:
    launch_kl_divergence(tokens, 49160, FORWARD)


def launch_grouped_mm_step(tokens: int, step: int) -> None:
    launch_grouped_mm(tokens, 128, 768, 2048)


def launch_probe(*_: int) -> None:
    probe_triton.launch(empty_meta(1, dtype=FP32))


@dataclass(frozen=True)
class KernelLaunches:
    """Launches of the kernels of one module."""

    variants: Callable[[], None]  # every specialization that a run with a preset can need
    large: Callable[[], None]  # more than 2^31 elements
    step: Callable[[int, int], None]  # a training step: number of tokens, step number

    def run(self, kind: str) -> None:
        if kind == "step":
            self.step(NUM_TOKENS, 1)
        else:
            {"variants": self.variants, "large": self.large}[kind]()


LAUNCHES = {
    "adamw8bit_triton": KernelLaunches(launch_adamw8bit_variants, launch_adamw8bit_large, launch_adamw8bit_step),
    "cross_entropy_triton": KernelLaunches(
        launch_cross_entropy_variants, launch_cross_entropy_large, launch_cross_entropy_step
    ),
    "kl_divergence_triton": KernelLaunches(
        launch_kl_divergence_variants, launch_kl_divergence_large, launch_kl_divergence_step
    ),
    "grouped_mm_triton": KernelLaunches(launch_grouped_mm_variants, launch_grouped_mm_large, launch_grouped_mm_step),
    "float8_triton": KernelLaunches(launch_float8_variants, launch_float8_large, launch_float8_step),
    "glu_triton": KernelLaunches(launch_glu_variants, launch_glu_large, launch_glu_step),
    "nf4_matmul_triton": KernelLaunches(launch_nf4_matmul_variants, launch_nf4_matmul_large, launch_nf4_matmul_step),
    "nf4_triton": KernelLaunches(launch_nf4_variants, launch_nf4_large, launch_nf4_step),
    "rms_norm_triton": KernelLaunches(launch_rms_norm_variants, launch_rms_norm_large, launch_rms_norm_step),
    "probe_triton": KernelLaunches(launch_probe, launch_probe, launch_probe),
    "rope_triton": KernelLaunches(launch_rope_variants, launch_rope_large, launch_rope_step),
}


@cache
def unique_launches(backend: str, kind: str = "variants") -> list[Launch]:
    """Launches of all modules with different compiled kernels, in a fixed order.

    They depend on the backend, "cuda" or "hip", but not on the architecture.
    """
    with record_launches(GPUTarget(backend, {"cuda": 80, "hip": "gfx942"}[backend], 32)) as launches:
        for kernels in LAUNCHES.values():
            kernels.run(kind)
    return list({launch.key: launch for launch in launches}.values())


def count_compiles(steps: Iterable[tuple[int, int]], module: str) -> int:
    """Number of kernels of a module that training steps compile, each with a number of tokens and a step number."""
    with record_launches(GPUTarget("cuda", 80, 32)) as launches:
        for tokens, step in steps:
            LAUNCHES[module].step(tokens, step)
    return len({launch.key for launch in launches})
