"""Comparison of a kernel with its reference: values and gradients, on the same random inputs.

References run on the CPU in fp32 or fp64: they share neither device, nor dtype, nor code with what is checked.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from tunekit.kernels import cpp_extension
from tunekit.selftest.context import Context
from tunekit.selftest.result import CheckFailedError, CheckSkippedError, Result

FP32, BF16 = torch.float32, torch.bfloat16
# Limits of relative errors (Frobenius norm). Rounding makes 1e-7 and 3e-3; errors of code make 0.01 and more.
LIMITS = {FP32: 1e-5, BF16: 1.5e-2}
DTYPE_NAMES = {FP32: "fp32", BF16: "bf16"}
Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Comparison:
    """Compares tensors and remembers the largest error of each dtype."""

    def __init__(self, context: Context, implementation: str) -> None:
        self.device, self.implementation = context.device, implementation
        self.errors: dict[str, float] = {}
        self.cases = 0

    def check(self, name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
        """Raise CheckFailedError if the relative error exceeds the limit of `dtype`, that of `actual` by default."""
        dtype = dtype or actual.dtype
        error = relative_error(actual, expected)
        if not error <= LIMITS[dtype]:  # NaN is an error, too
            text = f"{name}: relative error {error:.2g}, limit {LIMITS[dtype]:g} ({self.implementation})"
            raise CheckFailedError(text)
        key = DTYPE_NAMES[dtype]
        self.errors[key] = max(error, self.errors.get(key, 0.0))
        self.cases += 1

    def check_equal(self, name: str, actual: Tensor, expected: Tensor, max_fraction: float = 0.0) -> None:
        """Raise CheckFailedError if more than a fraction of the numbers differ."""
        fraction = float((actual.detach().cpu() != expected.detach().cpu()).double().mean())
        if fraction > max_fraction:
            raise CheckFailedError(f"{name}: {fraction:.2%} of the values differ ({self.implementation})")
        self.cases += 1

    def check_function(self, name: str, function: Function, reference: Function, inputs: Mapping[str, Tensor]) -> None:
        """Compare outputs, and gradients of all inputs. The reference gets the inputs in fp32 on the CPU."""
        actual = outputs_and_gradients(function, [x.to(self.device) for x in inputs.values()])
        expected = outputs_and_gradients(reference, [x.float() for x in inputs.values()])
        outputs = [f"output {i}" for i in range(len(actual) - len(inputs))]
        labels = [*outputs, *(f"gradient of {key}" for key in inputs)]
        coarsest = max((x.dtype for x in inputs.values()), key=lambda dtype: LIMITS[dtype])
        for label, a, b in zip(labels, actual, expected, strict=True):
            self.check(f"{name}, {label}", a, b, coarsest)

    def result(self) -> Result:
        """Number of comparisons and largest errors, for the report."""
        errors = ", ".join(f"{error:.1g} in {dtype}" for dtype, error in sorted(self.errors.items()))
        detail = f"{self.implementation}: {self.cases} comparisons, relative errors up to {errors or 0}"
        return Result(detail, {"implementation": self.implementation, "errors": self.errors, "comparisons": self.cases})


def outputs_and_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs of a function, and the gradients of its inputs for fixed gradients of the outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    gradients = torch.autograd.grad(outputs, leaves, [cosines(y) for y in outputs])
    return [*(y.detach() for y in outputs), *gradients]


def cosines(like: Tensor) -> Tensor:
    """A gradient without symmetry, the same on all devices."""
    return torch.arange(like.numel(), dtype=torch.float64).cos().view(like.shape).to(like.device, like.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in Frobenius norms."""
    if actual.shape != expected.shape:
        raise CheckFailedError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    a, b = (x.detach().cpu().double() for x in (actual, expected))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def require_fast_version(context: Context, module: ModuleType) -> str:
    """The name of the compiled version of a kernel; CheckSkippedError if there is none on this device."""
    if context.device.type == "cuda":
        return "Triton"
    if context.device.type != "cpu":
        raise CheckSkippedError(f"no compiled version for {context.device.type}: torch operations are used")
    if cpp_extension.load_library(module.SOURCE) is None:
        raise CheckSkippedError("the C++ version cannot be built (see kernels.compile): torch operations are used")
    if module.compiled() is None:
        raise CheckSkippedError("the C++ version does not support this processor: torch operations are used")
    return "C++"


@contextmanager
def require_triton_launches(context: Context) -> Iterator[None]:
    """On a GPU, raise CheckSkippedError at the end of the block if no Triton kernel was launched in it.

    Otherwise a fallback to torch operations would pass as the kernel.
    """
    if context.device.type != "cuda":
        yield
        return
    if importlib.util.find_spec("triton") is None:
        raise CheckSkippedError("Triton is not installed: torch operations are used")
    launches: list[object] = []
    hook = importlib.import_module("triton").knobs.runtime.launch_enter_hook
    hook.add(launches.append)
    try:
        yield
    finally:
        hook.remove(launches.append)
    if not launches:
        raise CheckSkippedError("no Triton kernel was launched: torch operations are used")
