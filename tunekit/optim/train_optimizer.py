"""The optimizer as a training loop sees it: clip the gradients, step, zero the gradients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tunekit.distributed.clip_grad import clip_gradients, grad_square_sum, norm_from_squares, total_grad_norm
from tunekit.distributed.collectives import all_reduce_tp_gradients
from tunekit.distributed.context import DistributedContext


class TrainOptimizer:
    """A torch optimizer whose gradients may be sharded over ranks.

    `inner` is the torch optimizer, for learning rate schedules and training states.
    """

    def __init__(self, inner: torch.optim.Optimizer, dist: DistributedContext) -> None:
        self.inner, self.dist = inner, dist
        self.params: list[nn.Parameter] = [p for group in inner.param_groups for p in group["params"]]

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`; 0 disables clipping.

        Returns the norm before clipping: 0-dim fp32, over all parameters and ranks. Gradients that overflowed because
        of the loss scale are dropped, and their norm is 0.
        """
        all_reduce_tp_gradients(self.params, self.dist)
        self.dist.loss_scaler.unscale(self.params)
        grad_norm = total_grad_norm(self.params, self.dist)
        if self.dist.loss_scaler.update(grad_norm):
            self.zero_grad()
            return torch.zeros_like(grad_norm)
        if max_norm:
            clip_gradients(self.params, grad_norm, max_norm)
        return grad_norm

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        self.inner.step()

    def zero_grad(self) -> None:
        """Free all gradients. A parameter without a gradient is not changed by `step`."""
        self.inner.zero_grad()


class OptimizerInBackward(TrainOptimizer):
    """Updates each parameter inside the backward pass, as soon as its gradient is complete, and frees the gradient.

    The backward pass does not read a parameter after its gradient is complete, so the update is safe. The inner
    optimizer sees one parameter at a time, in a group of its own. `step` and `zero_grad` have nothing left to do.
    """

    def __init__(self, inner: torch.optim.Optimizer, dist: DistributedContext) -> None:
        super().__init__(inner, dist)
        self.squares: dict[nn.Parameter, Tensor] = {}  # sums of squared gradients of the current step
        for group in inner.param_groups:
            for param in group["params"]:
                param.register_post_accumulate_grad_hook(partial(self.update, group))

    def update(self, group: dict[str, Any], param: nn.Parameter) -> None:
        """Backward hook: reduce the gradient of one parameter, update the parameter, free the gradient."""
        assert param.grad is not None and param not in self.squares, "optimizer_in_bwd needs one backward pass per step"
        all_reduce_tp_gradients([param], self.dist)
        self.squares[param] = grad_square_sum(param, self.dist)
        all_groups, self.inner.param_groups = self.inner.param_groups, [group | {"params": [param]}]
        self.inner.step()
        self.inner.param_groups = all_groups
        param.grad = None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """The gradient norm of this step. Clipping is not possible: the updates are done."""
        assert not max_norm, "optimizer_in_bwd cannot clip gradients"
        squares = [self.squares[param] for param in self.params if param in self.squares]
        self.squares.clear()
        return norm_from_squares(squares, self.dist)
