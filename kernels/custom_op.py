"""Choice between a custom operator of torch and the function that it wraps.

torch.compile, fake tensors and dispatch modes need the operator. In eager mode its wrappers take longer than many of
our kernels: 30 us in the forward pass and 40 us in the backward pass on a Xeon, where an autograd function takes 11 and
20 us.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled as is_profiling
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tunekit.kernels import fake_mode


def needs_custom_op(x: Tensor) -> bool:
    """Whether something other than the device sees operators: a compiler, a profile of the CPU, or a dispatch mode."""
    if torch.compiler.is_compiling() or fake_mode.is_fake():
        return True
    if x.device.type == "cpu" and is_profiling():  # a trace of a GPU has the kernels
        return True
    return x.device.type == "meta" or _get_current_dispatch_mode() is not None


def choose_kernel(x: Tensor, custom_op: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator if one is needed, else the function that it wraps."""
    return custom_op if needs_custom_op(x) else function


def autograd_function(
    forward: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Autograd function for eager mode, from the arguments of `torch.library.register_autograd`."""
    name = forward.__module__.rpartition(".")[2]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():  # create_graph=True: the gradients would be constants
                raise NotImplementedError(f"{name}: has no second derivative")
            return backward(ctx, *grads)

    return type(f"{name}_function", (Function,), {}).apply
