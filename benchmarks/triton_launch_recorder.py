"""Record launches of Triton kernels without a GPU, with all inputs of the compiler.

Launchers run with tensors on the meta device and a driver that only reports a target. Triton then derives the
signature, constants and argument attributes of each launch as it does on a GPU, and a hook records them instead of
compiling.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Launch:
    """Inputs of the compiler for one launch, and its integer arguments."""

    kernel: JITFunction
    key: str  # equal for launches that share one compiled kernel
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    grid: tuple[int, ...]
    integers: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    @property
    def pointers(self) -> str:
        """Element types of the pointers, without repeats."""
        return "/".join(dict.fromkeys(t[1:] for t in self.signature.values() if t.startswith("*")))

    @property
    def variant(self) -> str:
        """Compile-time constants: block sizes and flags, and arguments that are 1."""
        names = list(self.signature)
        return " ".join(f"{names[i]}={value}" for (i, *_), value in self.constants.items())


class TargetDriver:
    """Triton driver that only reports a target, from which launches derive their specialization."""

    def __init__(self) -> None:
        self.targets: list[GPUTarget] = []

    def get_current_device(self) -> int:  # differs by target: Triton caches the compiler of a device
        return len(self.targets) - 1

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.targets[-1]


DRIVER = TargetDriver()


@contextmanager
def record_launches(target: GPUTarget) -> Iterator[list[Launch]]:
    """Collect the launches inside the block, as they would be compiled for a target, without running them."""
    launches: list[Launch] = []
    pending: dict[str, Any] = {}
    run = JITFunction.run

    def run_with_arguments(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        pending.update(grid=grid, values=dict(zip(self.arg_names, args, strict=False)))
        run(self, *args, grid=grid, warmup=warmup, **options)

    def add_launch(**event: Any) -> bool:
        compiled, function = event["compile"], event["fn"].jit_function
        options = {name: compiled[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        integers = {name: value for name, value in pending["values"].items() if isinstance(value, int)}
        key = f"{function.__module__}.{event['repr']}{event['key']}"
        arguments = compiled["signature"], compiled["constants"], compiled["configs"][0]
        launches.append(Launch(function, key, *arguments, options, tuple(pending["grid"]), integers))
        return True  # do not compile

    DRIVER.targets.append(target)
    driver.set_active(DRIVER)
    JITFunction.run, knobs.runtime.jit_cache_hook = run_with_arguments, add_launch
    try:
        yield launches
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, None


def empty_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def describe_versions() -> str:
    return f"triton {triton.__version__}, torch {torch.__version__}"
