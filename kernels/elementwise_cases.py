"""Example calls of kernels that read and write each number once, and of linear layers with casts and LoRA."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import glu, rms_norm, rope
from tunekit.kernels.kernel_case import BF16, DTYPES, FP32, Kernel, KernelCase, compiled_kernel
from tunekit.kernels.linear import linear
from tunekit.kernels.lora import LoRAWeights, lora_linear

EPS = 1e-5
SHAPES = ((96, 1408), (33, 1001), (7, 9, 64), (3, 1, 5), (1, 9000))  # some are no multiple of any block
NORMS = {"llama": (0.0, False), "gemma": (1.0, False), "olmo": (0.0, True)}  # offset of the weight, rounding
WEIGHTS = {"fp32 weight": FP32, "bf16 weight": BF16, "no weight": None}
LAYOUTS = {
    "halves": {},
    "pairs": {"interleaved": True},
    "pairs to halves": {"interleaved": True, "interleaved_output": False},
    "last channels": {"rotate_last": True},
    "last pairs": {"interleaved": True, "rotate_last": True},
}
RANK, SCALE = 8, 0.5


def glu_cases(device: torch.device) -> Iterator[KernelCase]:
    for act, shape, (label, dtype) in product(sorted(glu.ACTIVATIONS), SHAPES, DTYPES.items()):
        inputs = {"gate": (4 * torch.randn(shape)).to(dtype), "up": (4 * torch.randn(shape)).to(dtype)}
        function = partial(glu.gated_activation, act)
        yield KernelCase(f"{act} {label} {list(shape)}", function, glu.ACTIVATIONS[act], inputs)


def rms_norm_cases(device: torch.device) -> Iterator[KernelCase]:
    """All shapes, and all combinations of options for one of them."""
    combinations = [*product(NORMS, WEIGHTS)]
    for (i, shape), (label, dtype) in product(enumerate(SHAPES), DTYPES.items()):
        for family, weight in combinations if i == 0 else [combinations[i]]:
            inputs, (offset, scale_in_fp32) = {"x": torch.randn(shape).to(dtype)}, NORMS[family]
            if weight_dtype := WEIGHTS[weight]:
                inputs["weight"] = (torch.rand(shape[-1]) + 0.5).to(weight_dtype)
            function = partial(normalize, offset=offset, scale_in_fp32=scale_in_fp32)
            reference = partial(normalize_reference, offset=offset)
            yield KernelCase(f"{family} {label}, {weight}, {list(shape)}", function, reference, inputs)


def normalize(x: Tensor, weight: Tensor | None = None, offset: float = 0.0, scale_in_fp32: bool = False) -> Tensor:
    return rms_norm.rms_norm(x, weight, EPS, offset, scale_in_fp32)


def normalize_reference(x: Tensor, weight: Tensor | None = None, offset: float = 0.0) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * (weight + offset)


def rope_cases(device: torch.device) -> Iterator[KernelCase]:
    for (layout, options), (label, dtype), pairs in product(LAYOUTS.items(), DTYPES.items(), (16, 12)):
        angles = torch.rand(2, 57, 1, pairs) * 18 - 9
        tables = rope.RopeTables(angles.cos(), angles.sin(), **options)
        on_device = tables._replace(cos=tables.cos.to(device), sin=tables.sin.to(device))
        inputs = {"q": torch.randn(2, 57, 6, 39).to(dtype), "k": torch.randn(2, 57, 3, 39).to(dtype)}
        function, reference = partial(rope.apply_rope, tables=on_device), partial(rotate_heads, tables)
        yield KernelCase(f"{layout} {label}, {pairs} pairs", function, reference, inputs)


def rotate_heads(tables: rope.RopeTables, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return rotate_complex(q, tables), rotate_complex(k, tables)


def rotate_complex(x: Tensor, tables: rope.RopeTables) -> Tensor:
    """Rotate as complex numbers in fp64."""
    width = 2 * tables.cos.shape[-1]
    start = x.shape[-1] - width if tables.rotate_last else 0
    before, rotary, after = x.double().tensor_split([start, start + width], dim=-1)
    real, imaginary = (rotary[..., ::2], rotary[..., 1::2]) if tables.interleaved else rotary.chunk(2, -1)
    rotated = torch.complex(real, imaginary) * torch.complex(tables.cos.double(), tables.sin.double())
    if tables.interleaved and tables.interleaved_output:
        return torch.cat([before, torch.view_as_real(rotated).flatten(-2), after], -1)
    return torch.cat([before, rotated.real, rotated.imag, after], -1)


def linear_cases(device: torch.device) -> Iterator[KernelCase]:
    """Weights in another dtype than the products."""
    for (label, dtype), (weight_label, weight_dtype) in product(DTYPES.items(), DTYPES.items()):
        inputs = {"x": torch.randn(3, 40, 96), "weight": torch.randn(200, 96), "bias": torch.randn(200)}
        dtypes = {"x": dtype, "weight": weight_dtype, "bias": weight_dtype}
        inputs = {name: x.to(dtypes[name]) for name, x in inputs.items()}
        yield KernelCase(f"{label}, {weight_label} weight", linear, F.linear, inputs)


def lora_cases(device: torch.device) -> Iterator[KernelCase]:
    """Two layers that share their input, with gradients of the input and of all factors."""
    for label, dtype in DTYPES.items():
        weights = [torch.randn(out, 128).to(dtype) * 128**-0.5 for out in (192, 64)]
        inputs = {"x": torch.randn(2, 33, 128).to(dtype)}
        for i, weight in enumerate(weights):
            inputs |= {f"a{i}": torch.randn(RANK, 128) * 0.1, f"b{i}": torch.randn(len(weight), RANK) * 0.1}
        function = partial(adapt, [FrozenLinear(weight.to(device)) for weight in weights])
        yield KernelCase(label, function, partial(adapt_reference, [weight.double() for weight in weights]), inputs)


@dataclass(frozen=True, eq=False)
class FrozenLinear:
    """A layer without bias."""

    weight: Tensor
    effective_bias: None = None
    is_frozen: bool = True

    def matmul(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def matmul_backward(self, grad: Tensor, into: Tensor | None) -> Tensor:
        return grad @ self.weight if into is None else into.addmm_(grad, self.weight)

    def iter_fp32_rows(self, num_rows: int) -> Iterable[Tensor]:
        return self.weight.float().split(num_rows)


def adapt(bases: list[FrozenLinear], x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    pairs = zip(bases, factors[::2], factors[1::2], strict=True)
    return lora_linear(x, [LoRAWeights(base, SCALE, a, b) for base, a, b in pairs])


def adapt_reference(weights: list[Tensor], x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    pairs = zip(weights, factors[::2], factors[1::2], strict=True)
    return tuple(x @ weight.T + SCALE * (x @ a.T) @ b.T for weight, a, b in pairs)


KERNELS = (
    compiled_kernel("glu", glu_cases, glu),
    compiled_kernel("rms_norm", rms_norm_cases, rms_norm),
    compiled_kernel("rope", rope_cases, rope),
    Kernel("linear", linear_cases),
    Kernel("lora", lora_cases),
)
