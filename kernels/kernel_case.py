"""Example calls of kernels with their references: `tune selftest` and the unit tests check all of them.

References are definitions in fp64 on the CPU: they share neither device, nor dtype, nor code with a kernel.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tunekit.kernels import cpp_extension

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = {"fp32": FP32, "bf16": BF16}
# Limits of relative errors. Rounding makes 1e-7 and 3e-3; errors of code make 0.01 and more.
LIMITS = {FP32: 1e-5, BF16: 2e-2}
MAX_CODE_FRACTION = 1e-3  # rounding may choose a neighbor for this fraction of quantized codes
Function = Callable[..., Tensor | tuple[Tensor, ...]]


class KernelUnavailableError(Exception):
    """A kernel cannot run here. The message is the reason."""


class Difference(NamedTuple):
    """Relative error of a tensor, the larger one of the Frobenius norm and the maximum norm; a fraction for codes."""

    name: str
    dtype: torch.dtype
    error: float
    limit: float

    @property
    def is_too_large(self) -> bool:
        return not self.error <= self.limit  # NaN is an error, too


@dataclass(frozen=True)
class KernelCase:
    """A call whose outputs, and gradients of all inputs of floating point, equal those of a reference."""

    name: str
    function: Function
    reference: Function
    inputs: Mapping[str, Tensor]
    has_gradients: bool = True
    limit: float | None = None  # by default that of the coarsest input, or without gradients of each output
    max_code_step: int | None = None  # maximum difference of integer outputs

    def compare(self, device: torch.device) -> Iterator[Difference]:
        """Run the function on a device, and compare all results with those of the reference."""
        inputs = [x.to(device, copy=True) for x in self.inputs.values()]
        exact = [x.double() if x.is_floating_point() else x.clone() for x in self.inputs.values()]
        actual = run(self.function, inputs, self.has_gradients)
        expected = run(self.reference, exact, self.has_gradients)
        trained = [name for name, x in self.inputs.items() if x.is_floating_point()] if self.has_gradients else []
        outputs = [f"output {i}" for i in range(len(actual) - len(trained))]
        labels = [*outputs, *(f"gradient of {name}" for name in trained)]
        for label, a, b in zip(labels, actual, expected, strict=True):
            yield self.measure(f"{self.name}, {label}", a, b)

    def measure(self, name: str, actual: Tensor, expected: Tensor) -> Difference:
        if not actual.is_floating_point():
            steps = (actual.cpu().long() - expected.long()).abs()
            is_near = self.max_code_step is None or int(steps.max()) <= self.max_code_step
            fraction = float((steps > 0).double().mean()) if is_near else float("inf")
            return Difference(name, actual.dtype, fraction, MAX_CODE_FRACTION)
        dtype = actual.dtype
        if self.has_gradients:
            floating = [x.dtype for x in self.inputs.values() if x.is_floating_point()]
            dtype = max(floating, key=lambda dtype: LIMITS[dtype])
        return Difference(name, dtype, relative_error(actual, expected), self.limit or LIMITS[dtype])


def run(function: Function, inputs: list[Tensor], has_gradients: bool) -> list[Tensor]:
    """Outputs of a function, and the gradients of its inputs for fixed gradients of the outputs."""
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()] if has_gradients else []
    with torch.set_grad_enabled(has_gradients):
        outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    gradients = torch.autograd.grad(outputs, leaves, [cosines(y) for y in outputs]) if leaves else ()
    return [*(y.detach() for y in outputs), *gradients]


def cosines(like: Tensor) -> Tensor:
    """A gradient without symmetry, the same on all devices and exact in bf16."""
    numbers = torch.arange(like.numel(), dtype=torch.float64).cos().to(BF16)
    return numbers.view(like.shape).to(like.device, like.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, in the Frobenius norm or the maximum norm."""
    if actual.shape != expected.shape:
        raise ValueError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    a, b = (x.detach().cpu().double().flatten() for x in (actual, expected))
    norms = (2, torch.inf) if len(a) else (2,)
    errors = torch.stack([(a - b).norm(p) / b.norm(p).clamp(min=1e-30) for p in norms])
    return float(errors.max())  # NaN if one of them is


@dataclass(frozen=True)
class Kernel:
    """An operation with example calls, and the implementations that it has."""

    name: str
    make_cases: Callable[[torch.device], Iterator[KernelCase]]
    # Name of the implementation on a device. Raises KernelUnavailableError if only torch operations are left.
    implementation: Callable[[torch.device], str] = lambda device: "torch"
    module: ModuleType | None = None  # whose function `compiled` returns the C++ library, or None


def compiled_kernel(
    name: str, make_cases: Callable[[torch.device], Iterator[KernelCase]], module: ModuleType
) -> Kernel:
    """A kernel in C++ for the CPU and in Triton for GPUs."""

    def implementation(device: torch.device) -> str:
        return "Triton" if device.type == "cuda" else require_library(module, device)

    return Kernel(name, make_cases, implementation, module)


def require_library(module: ModuleType, device: torch.device) -> str:
    """Raise KernelUnavailableError if the C++ version of a kernel cannot run."""
    if device.type != "cpu":
        raise KernelUnavailableError(f"no compiled version for {device.type}: torch operations are used")
    if cpp_extension.load_library(module.SOURCE) is None:
        raise KernelUnavailableError("the C++ version cannot be built (see kernels.compile): torch operations are used")
    if module.compiled() is None:
        raise KernelUnavailableError("the C++ version does not support this processor: torch operations are used")
    return "C++"


@contextmanager
def require_triton_launches() -> Iterator[None]:
    """Raise KernelUnavailableError at the end of the block if no Triton kernel was launched in it.

    Otherwise a fallback to torch operations would pass as the kernel.
    """
    if importlib.util.find_spec("triton") is None:
        raise KernelUnavailableError("Triton is not installed: torch operations are used")
    launches: list[object] = []
    hook = importlib.import_module("triton").knobs.runtime.launch_enter_hook
    hook.add(launches.append)
    try:
        yield
    finally:
        hook.remove(launches.append)
    if not launches:
        raise KernelUnavailableError("no Triton kernel was launched: torch operations are used")
