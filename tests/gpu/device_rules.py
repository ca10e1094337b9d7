"""The meta device as a GPU: operations that a GPU refuses or waits for are errors on a machine without one.

torch checks devices of meta tensors like those of CUDA. Reading a meta tensor fails too, but the message names no
line of ours, and blocking copies of pageable memory pass: both are checked here.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunekit.plan.fake_tensors import call_with_cached_layout, returns_new_tensor, runs_on_meta

ROOT = Path(__file__).resolve().parents[2]
META = torch.device("meta")
PLAIN = {Tensor, torch.nn.Parameter}
# The size of the result depends on numbers of the device.
DATA_DEPENDENT = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim"}
FROM_HOST = {torch.tensor, torch.as_tensor, Tensor.new_tensor}  # these skip the dispatcher
COPIES = {"_to_copy", "copy_"}


class HostWaitError(AssertionError):
    """The host reads a number of the device."""


class MixedDevicesError(AssertionError):
    """An operator gets tensors of the host and of the device."""


def call_site() -> str:
    """File and line of the innermost frame of the repository that is no test."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).resolve()
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests") and ".venv" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "tests"


class DeviceRules(TorchDispatchMode):
    """Raises on mixtures and waits, and counts blocking copies to the device by the line that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking_copies: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors):
            self.check(func, args, tensors, kwargs)
            if runs_on_meta(func) and returns_new_tensor(func) and all(x.is_meta and type(x) in PLAIN for x in tensors):
                return call_with_cached_layout(func, args, kwargs)
        elif func.overloadpacket.__name__ in COPIES and torch.device(kwargs.get("device") or "cpu") == META:
            self.count_copy(kwargs.get("non_blocking", False))
        return func(*args, **kwargs)

    def check(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
        name = func.overloadpacket.__name__
        to_host = name == "_to_copy" and torch.device(kwargs.get("device") or META) != META
        by_mask = name == "index" and any(x.dtype == torch.bool for x in tensors[1:])
        if name in DATA_DEPENDENT or by_mask or to_host or (name == "copy_" and not args[0].is_meta):
            raise HostWaitError(f"{call_site()}: {name} waits for the device")
        on_host = [x for x in tensors if not x.is_meta]
        if name == "copy_" and on_host:
            self.count_copy(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        elif func.namespace != "tunekit" and any(x.ndim for x in on_host):
            raise MixedDevicesError(f"{call_site()}: {name} gets tensors of the host and of the device")

    def count_copy(self, non_blocking: bool) -> None:
        if not non_blocking:
            self.blocking_copies[call_site()] += 1


class HostLiterals(TorchFunctionMode):
    """Counts tensors that are made of Python numbers on the device: blocking copies too."""

    def __init__(self, rules: DeviceRules) -> None:
        self.rules = rules

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in FROM_HOST and result.is_meta:
            self.rules.count_copy(False)
        return result


@contextmanager
def device_rules() -> Iterator[DeviceRules]:
    """Check all that happens inside."""
    rules = DeviceRules()
    with rules, HostLiterals(rules):
        yield rules
