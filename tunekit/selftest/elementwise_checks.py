"""Kernels that read and write each number once, and the linear layers with casts and LoRA."""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import glu, rms_norm, rope
from tunekit.kernels.linear import linear
from tunekit.kernels.lora import LoRAWeights, lora_linear
from tunekit.models.linear import Linear
from tunekit.selftest.compare import (
    BF16,
    DTYPE_NAMES,
    FP32,
    Comparison,
    require_fast_version,
    require_triton_launches,
)
from tunekit.selftest.context import Context
from tunekit.selftest.result import Result

EPS = 1e-5
SHAPES = ((96, 1408), (33, 1001))  # the second is no multiple of any block
NORMS = {"llama": (0.0, False), "gemma": (1.0, False), "olmo": (0.0, True)}  # offset of the weight, rounding
RANK, SCALE = 8, 0.5


def check_glu(context: Context) -> Result:
    comparison = Comparison(context, require_fast_version(context, glu))
    with require_triton_launches(context):
        for act, shape, (dtype, label) in product(sorted(glu.FUSED_ACTIVATIONS), SHAPES, DTYPE_NAMES.items()):
            inputs = {"gate": torch.randn(shape).to(dtype), "up": torch.randn(shape).to(dtype)}
            name = f"{act} {label} {list(shape)}"
            comparison.check_function(name, partial(glu.gated_activation, act), glu.ACTIVATIONS[act], inputs)
    return comparison.result()


def check_rms_norm(context: Context) -> Result:
    comparison = Comparison(context, require_fast_version(context, rms_norm))
    with require_triton_launches(context):
        for (family, options), shape, (dtype, label) in product(NORMS.items(), SHAPES, DTYPE_NAMES.items()):
            offset, scale_in_fp32 = options
            inputs = {"x": torch.randn(shape).to(dtype), "weight": torch.rand(shape[-1]) + 0.5}
            fast = partial(rms_norm.rms_norm, eps=EPS, offset=offset, scale_in_fp32=scale_in_fp32)
            reference = partial(rms_norm.reference, eps=EPS, offset=offset, scale_in_fp32=scale_in_fp32)
            comparison.check_function(f"{family} {label} {list(shape)}", fast, reference, inputs)
    return comparison.result()


def check_rope(context: Context) -> Result:
    comparison = Comparison(context, require_fast_version(context, rope))
    layouts = {
        "halves": {},
        "pairs": {"interleaved": True},
        "pairs to halves": {"interleaved": True, "interleaved_output": False},
        "last channels": {"rotate_last": True},
    }
    with require_triton_launches(context):
        for (layout, options), (dtype, label) in product(layouts.items(), DTYPE_NAMES.items()):
            angles = torch.rand(2, 57, 1, 16) * 6.28
            tables = rope.RopeTables(angles.cos(), angles.sin(), **options)
            moved = tables._replace(cos=tables.cos.to(context.device), sin=tables.sin.to(context.device))
            inputs = {"q": torch.randn(2, 57, 6, 48).to(dtype), "k": torch.randn(2, 57, 3, 48).to(dtype)}
            fast, reference = partial(rope.apply_rope, tables=moved), partial(rotate_reference, tables)
            comparison.check_function(f"{layout} {label}", fast, reference, inputs)
    return comparison.result()


def rotate_reference(tables: rope.RopeTables, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return rope.reference(q, tables), rope.reference(k, tables)


def check_linear(context: Context) -> Result:
    """Weights in fp32, products in bf16."""
    comparison = Comparison(context, "torch")
    for dtype, label in DTYPE_NAMES.items():
        inputs = {"x": torch.randn(3, 40, 96).to(dtype), "weight": torch.randn(200, 96), "bias": torch.randn(200)}
        if dtype is BF16:  # the product rounds the weight first
            inputs["weight"] = inputs["weight"].to(BF16).to(FP32)
        comparison.check_function(label, linear, F.linear, inputs)
    return comparison.result()


def check_lora(context: Context) -> Result:
    """Two layers that share their input, with gradients of the input and of all factors."""
    comparison = Comparison(context, "torch")
    for dtype, label in DTYPE_NAMES.items():
        weights = [torch.randn(out, 128).to(dtype) * 128**-0.5 for out in (192, 64)]
        inputs = {"x": torch.randn(2, 33, 128).to(dtype)}
        for i, weight in enumerate(weights):
            inputs |= {f"a{i}": torch.randn(RANK, 128) * 0.1, f"b{i}": torch.randn(len(weight), RANK) * 0.1}
        inputs = {key: x.to(dtype).to(x.dtype) for key, x in inputs.items()}
        bases = [frozen_linear(weight.to(context.device)) for weight in weights]
        fast, reference = partial(adapt, bases), partial(adapt_reference, [weight.float() for weight in weights])
        comparison.check_function(label, fast, reference, inputs)
    return comparison.result()


def frozen_linear(weight: Tensor) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    layer.weight.requires_grad_(False).copy_(weight)
    return layer


def adapt(bases: list[Linear], x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    pairs = zip(bases, factors[::2], factors[1::2], strict=True)
    return lora_linear(x, [LoRAWeights(base, SCALE, a, b) for base, a, b in pairs])


def adapt_reference(weights: list[Tensor], x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    pairs = zip(weights, factors[::2], factors[1::2], strict=True)
    return tuple(x @ weight.T + SCALE * (x @ a.T) @ b.T for weight, a, b in pairs)
