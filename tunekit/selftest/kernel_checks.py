"""Each kernel equals its reference, in values and gradients, for the example calls that the unit tests use too."""

from contextlib import nullcontext
from functools import partial

from tunekit.kernels.kernel_case import DTYPES, Kernel, KernelUnavailableError, require_triton_launches
from tunekit.kernels.kernel_table import KERNELS
from tunekit.selftest.context import CheckFunction, Context
from tunekit.selftest.result import CheckFailedError, CheckSkippedError, Result


def check_kernel(kernel: Kernel, context: Context) -> Result:
    try:
        implementation = kernel.implementation(context.device)
        with require_triton_launches() if implementation == "Triton" else nullcontext():
            return compare_kernel(kernel, implementation, context)
    except KernelUnavailableError as error:
        raise CheckSkippedError(str(error)) from error


def compare_kernel(kernel: Kernel, implementation: str, context: Context) -> Result:
    """Number of comparisons, and the largest error of each dtype."""
    differences = [d for case in kernel.make_cases(context.device) for d in case.compare(context.device)]
    for difference in differences:
        if difference.is_too_large:
            error = f"relative error {difference.error:.2g}, limit {difference.limit:g}"
            raise CheckFailedError(f"{difference.name}: {error} ({implementation})")
    errors = {
        label: max(errors)
        for label, dtype in DTYPES.items()
        if (errors := [difference.error for difference in differences if difference.dtype == dtype])
    }
    text = ", ".join(f"{error:.1g} in {label}" for label, error in errors.items())
    detail = f"{implementation}: {len(differences)} comparisons, relative errors up to {text}"
    return Result(detail, {"implementation": implementation, "errors": errors, "comparisons": len(differences)})


FUNCTIONS: dict[str, CheckFunction] = {name: partial(check_kernel, kernel) for name, kernel in KERNELS.items()}
