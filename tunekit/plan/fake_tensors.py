"""Operations on fake tensors, without most of the work of FakeTensorMode.

It handles other devices and symbolic shapes as well, which takes several times as long as the meta operation. All
tensors of a plan are on the CPU.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _get_current_dispatch_mode

CPU = torch.device("cpu")
VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
DISPATCH_KEYS = ("Meta", "CompositeExplicitAutograd")


def call_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation; on the meta device if that has the same outputs."""
    mode = _get_current_dispatch_mode()
    if not (isinstance(mode, FakeTensorMode) and runs_on_meta(func) and are_plain(args) and are_plain(kwargs.values())):
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        outputs = func(*args, **kwargs)
    if isinstance(outputs, list | tuple):
        return type(outputs)(wrap_meta_tensor(x, mode) for x in outputs)
    return wrap_meta_tensor(outputs, mode)


def wrap_meta_tensor(x: Any, mode: FakeTensorMode) -> Any:
    """Fake tensor of a meta tensor. Outputs in place are fake tensors already."""
    return FakeTensor(mode, x, CPU) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x


@cache
def runs_on_meta(func: Any) -> bool:
    """Whether an operation of torch has tensors as inputs, and its output depends on their shapes only."""
    has_kernel = any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in DISPATCH_KEYS)
    takes_tensors = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return func.namespace == "aten" and has_kernel and takes_tensors and VALUE_DEPENDENT.isdisjoint(func.tags)


def are_plain(values: Any) -> bool:
    """Whether all tensors are fake ones without a value, and no device is named."""
    for value in values:
        if isinstance(value, Tensor):
            if type(value) is not FakeTensor or value.constant is not None:
                return False
        elif isinstance(value, torch.device) or (isinstance(value, list | tuple) and not are_plain(value)):
            return False
    return True
