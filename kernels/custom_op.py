"""Kernels as custom operators of torch, which eager mode bypasses.

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


class KernelOp:
    """Function whose first argument is a tensor. It is called through the operator `tunekit::name` only if needed."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function = self.function_with_gradients = function
        self.op = torch.library.custom_op(f"tunekit::{name}", function, mutates_args=())
        self.register_fake = self.op.register_fake

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Set the gradients, with the arguments of `torch.library.register_autograd`."""
        self.op.register_autograd(backward, setup_context=setup_context)
        self.function_with_gradients = autograd_function(self.function, setup_context, backward)

    def __call__(self, x: Tensor, *args: Any) -> Any:
        if needs_custom_op(x):
            return self.op(x, *args)
        return self.function_with_gradients(x, *args) if torch.is_grad_enabled() else self.function(x, *args)


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
