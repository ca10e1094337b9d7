"""Count the kernel launches and host waits of a CUDA program on a machine without a GPU.

Meta tensors replace CUDA tensors: their device is reported as `cuda:0`, so that the Python code takes its CUDA paths,
and an operator that mixes them with CPU tensors fails as it does on a GPU. Every operator that would launch a kernel
counts as one launch; views and allocations count as none. Custom operators of tunekit run their CUDA implementation, in
which every Triton launch counts as one. A call of cuBLAS, of a sort or of an attention kernel is one launch as well,
although the library may split it: the result is a lower bound, by the same rule for every library.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from tunekit import devices
from tunekit.kernels import triton_support

CUDA, META = torch.device("cuda", 0), torch.device("meta")
ALLOCATIONS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "resize_", "set_"),
    *("_unsafe_view", "detach_", "_reshape_alias", "record_stream", "is_same_size", "_local_scalar_dense"),
    *("sym_size", "sym_stride", "sym_numel", "is_pinned", "_has_compatible_shallow_copy_type"),
}
# The host has to read values, on which the size of the result depends.
DATA_DEPENDENT = {"nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "is_nonzero", "equal"}
# ATen/native/cuda/MultiTensorApply.cuh: tensors of one launch by number of lists, blocks of one launch, chunk size.
MAX_TENSORS, MAX_BLOCKS, CHUNK_SIZE = (110, 64, 48, 36, 30), 320, 65536


@dataclass
class Counts:
    """Launches and waits by phase of a step."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)  # by phase and name
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)  # of waits, by phase and name

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    @property
    def num_waits(self) -> int:
        return self.waits.total()


def is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


class MetaDeviceMode(TorchFunctionMode):
    """Replace `cuda` by `meta` in arguments, and operators that meta tensors cannot run by an equivalent."""

    def __init__(self, counter: "LaunchCounter") -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args = tuple(to_meta_device(a) for a in args)
        kwargs = {k: to_meta_device(v) for k, v in (kwargs or {}).items()}
        name = func.__name__
        if name == "tolist" and is_meta(args[0]):
            self.counter.add_wait("tolist")
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").tolist()
        if name in ("tensor", "as_tensor") and kwargs.get("device") == META and not is_meta(args[0]):
            self.counter.add_wait(f"torch.{name}(data, device='cuda')")
        if func is F.scaled_dot_product_attention and is_meta(args[0]):
            return run_fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


def to_meta_device(value: Any) -> Any:
    """Replace a CUDA device by the meta device; return other values unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return META
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return META
    return value


def run_fused_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Run the fused kernel that CUDA selects: FlashAttention, or with a mask the memory-efficient one."""
    scale = kwargs.get("scale")
    if attn_mask is None:
        is_causal = kwargs.get("is_causal", False)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, scale=scale)[0]


class LaunchCounter(TorchDispatchMode):
    """Counts the launches of each operator on the device, and the points where the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.counts = "setup", Counts()
        self.in_operator = False  # torch's own shape functions must see the meta device
        self.meta_device_mode = MetaDeviceMode(self)

    def add_launches(self, name: str, number: int = 1) -> None:
        self.counts.launches[self.phase] += number
        self.counts.operators[self.phase, name] += number

    def add_wait(self, name: str) -> None:
        self.counts.waits[self.phase] += 1
        self.counts.causes[self.phase, name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace == "tunekit" and any(map(is_meta, flatten(args))):
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
            with self, self.meta_device_mode:
                return func.redispatch(keys, *args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if name == "_local_scalar_dense" and is_meta(args[0]):
            self.add_wait("item")
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if name in ("_to_copy", "copy_") and (result := self.count_copy(name, args, kwargs)) is not None:
            return result
        if name in DATA_DEPENDENT or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            return self.run_data_dependent(func, name, args, kwargs)
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.add_wait("index with a mask")
        result = self.run_operator(func, args, kwargs)
        if any(map(is_meta, flatten((args, kwargs, result)))):
            self.add_launches(name, count_operator_launches(func, name, args, kwargs))
        return result

    def run_operator(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator on meta tensors, or on the CPU."""
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 cannot run it on the meta device
            return kwargs["out"]
        self.in_operator = True
        try:
            return func(*args, **kwargs)
        finally:
            self.in_operator = False

    def count_copy(self, name: str, args: tuple, kwargs: dict) -> Tensor | None:
        """Count a copy between host and device, and return its result; None for other copies."""
        source = args[0] if name == "_to_copy" else args[1]
        target = kwargs.get("device") if name == "_to_copy" else args[0].device
        non_blocking = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        to_host = is_meta(source) and target is not None and target.type == "cpu"
        to_device = not is_meta(source) and target in (META, CUDA)
        if (to_host or to_device) and not non_blocking:
            self.add_wait("copy to the host" if to_host else "blocking copy to the device")
        if to_host and name == "_to_copy":
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype, device="cpu")
        if to_host:
            return args[0]
        if to_device:  # a copy does not launch a kernel
            shape, dtype = source.shape, kwargs.get("dtype") or source.dtype
            return torch.empty(shape, dtype=dtype, device=META) if name == "_to_copy" else args[0]
        return None

    def run_data_dependent(self, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
        """Count an operator whose result depends on values, and return a result of the maximum size."""
        if not any(map(is_meta, flatten(args))):
            return func(*args, **kwargs)
        self.add_wait(name)
        self.add_launches(name)
        if name in ("is_nonzero", "equal"):
            return True
        size = args[0].numel()
        return args[0].new_empty((size, args[0].ndim) if name == "nonzero" else (size,))


def flatten(values: Any) -> Iterator[Any]:
    """All leaves of nested tuples, lists and dicts."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        yield values
        return
    for value in values:
        yield from flatten(value)


def count_operator_launches(func: Any, name: str, args: tuple, kwargs: dict) -> int:
    """Number of kernels that an operator of torch launches."""
    if name in ALLOCATIONS or is_view(func):
        return 0
    if name.startswith("_foreach_") or name.startswith("_fused_"):
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, tuple | list) and a and isinstance(a[0], Tensor)]
        # Lists of scalars, such as steps of optimizer states, need no further launches.
        lists = [a for a in lists if a[0].ndim or len(lists) == 1]
        launches = count_multi_tensor_launches([t.numel() for t in lists[0]], len(lists)) if lists else 1
        return launches + (name == "_foreach_norm")  # a second kernel sums over chunks
    return 1


def is_view(func: Any) -> bool:
    """Whether the result is an alias of an argument that is not written to."""
    infos = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    returned = any(r.alias_info is not None for r in func._schema.returns)
    return returned and bool(infos) and not any(info.is_write for info in infos)


def count_multi_tensor_launches(sizes: list[int], num_lists: int) -> int:
    """Launches of multi_tensor_apply over `num_lists` lists of tensors of these sizes."""
    launches = tensors = blocks = 0
    for size in sizes:
        tensors += 1
        for chunk in range(num_chunks := math.ceil(size / CHUNK_SIZE)):
            blocks += 1
            is_last = chunk == num_chunks - 1
            if blocks == MAX_BLOCKS or (is_last and tensors == MAX_TENSORS[min(num_lists, 5) - 1]):
                launches, blocks, tensors = launches + 1, 0, 0 if is_last else 1
    return launches + (blocks > 0)


@contextmanager
def simulated_capabilities(capability: tuple[int, int]) -> Iterator[None]:
    """Describe CUDA and meta devices as a GPU of this capability in the device table."""
    describe = devices.describe_device

    def describe_simulated(device: torch.device) -> devices.Device:
        return devices.Device("cuda", capability) if device.type in ("cuda", "meta") else describe(device)

    devices.device_capabilities.cache_clear()
    with patch.object(devices, "describe_device", describe_simulated):
        yield
    devices.device_capabilities.cache_clear()


def build_cuda_patches(capability: tuple[int, int]) -> list[tuple[Any, str, Any]]:
    """Replacements of functions of torch that describe the device: owner, name, replacement."""
    return [
        (torch.nn.utils.clip_grad, "_has_foreach_support", lambda *_: True),
        (torch.cuda, "is_available", lambda: True),
        # Called by optimizers; a CUDA build without a driver raises an error.
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda *_: capability),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (Tensor, "pin_memory", lambda tensor, *_: tensor),
    ]


@contextmanager
def simulated_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[LaunchCounter]:
    """Present meta tensors as CUDA tensors of a device of this capability."""
    counter = LaunchCounter()
    device = Tensor.device
    run_backward = torch.autograd.graph._engine_run_backward

    def get_device(tensor: Tensor) -> torch.device:
        actual = device.__get__(tensor)
        return CUDA if actual.type == "meta" and not counter.in_operator else actual

    def run_engine(*args: Any, **kwargs: Any) -> Any:
        # torch.autograd.grad and Tensor.backward disable the function mode before they start the engine.
        with counter.meta_device_mode:
            return run_backward(*args, **kwargs)

    def count_launch(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
        counter.add_launches(f"triton {kernel.__name__}")

    replacements: list[tuple[Any, str, Any]] = [
        (Tensor, "device", property(get_device)),
        (Tensor, "is_cuda", property(lambda tensor: get_device(tensor).type == "cuda")),
        (torch.autograd, "_engine_run_backward", run_engine),
        (torch.autograd.graph, "_engine_run_backward", run_engine),
        (JITFunction, "run", count_launch),
        (triton_support, "can_launch", lambda: True),
        *build_cuda_patches(capability),
    ]
    with ExitStack() as stack:
        stack.enter_context(simulated_capabilities(capability))
        for owner, name, value in replacements:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(counter)
        stack.enter_context(counter.meta_device_mode)
        yield counter


def count_step(run_step: Callable[[LaunchCounter], object], capability: tuple[int, int] = (9, 0)) -> Counts:
    """Count the second step: the first one fills caches and creates optimizer states."""
    with simulated_cuda(capability) as counter:
        run_step(counter)
        counter.counts = Counts()
        run_step(counter)
    return counter.counts
