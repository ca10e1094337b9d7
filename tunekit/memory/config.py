"""Memory for time, and time for memory: what is kept of a pass and where, when weights move, what is compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tunekit import devices
from tunekit.distributed.clip_grad import clip_gradients, grad_square_sum, norm_from_squares, total_grad_norm
from tunekit.distributed.collectives import all_reduce_tp_gradients
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.memory.activation_offloading import ActivationOffloader
from tunekit.models.decoder import Decoder

CPU = torch.device("cpu")
# What `selective` keeps: products and attention. Norms, rotations and gates are run again.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
CHEAP = {"rms_norm", "rotate", "gated"}  # of our own operations


@dataclass(frozen=True)
class MemoryConfig:
    # full: keep only the input of each layer and recompute the layer in the backward pass; selective: also keep matmul
    # and attention outputs; recompute norms, RoPE and activations
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    activation_offloading: bool = False  # Keep saved activations in host memory until the backward pass; GPU only
    optimizer_in_bwd: bool = False  # Update each weight as soon as its gradient is ready, then free the gradient

    def check(self, device: torch.device) -> None:
        """Whether the device can do all of it."""
        row = devices.capabilities(device)
        if self.activation_offloading and not row.own_memory:
            raise UserError(
                f"memory.activation_offloading: device {device.type} has no memory of its own. "
                "Set memory.activation_offloading=false."
            )

    def apply(self, model: Decoder, device: torch.device = CPU) -> None:
        """Set how the model runs its layers when gradients are required."""
        self.check(device)
        model.layer_call = self.through()
        if self.activation_offloading:
            model.layer_call = ActivationOffloader(model).wrap_layer_call(model.layer_call or call_layer)

    def through(self) -> Callable[..., Tensor] | None:
        """How a layer is called where gradients are wanted; None: just so."""
        if self.activation_checkpointing == "none":
            return None
        again = partial(checkpoint, use_reentrant=False)
        if self.activation_checkpointing == "selective":
            # What changes a product in place is kept too, so that running a layer again changes it no second time.
            contexts = partial(
                create_selective_checkpoint_contexts, selective_checkpoint_policy, allow_cache_entry_mutation=True
            )
            return partial(again, context_fn=contexts)
        return again

    def update(
        self, optimizer: torch.optim.Optimizer, clip: float, run: DistributedContext, allowed: "Allowed | None" = None
    ) -> "TrainOptimizer":
        """What moves the weights, each step as far as it is `allowed`."""
        moved = OptimizerInBackward(optimizer, run) if self.optimizer_in_bwd else TrainOptimizer(optimizer, clip, run)
        moved.allowed = allowed or moved.allowed
        return moved

    def refusal(self, clip: float) -> str | None:
        """Why weights cannot move inside a backward pass, and how to mend it."""
        if self.optimizer_in_bwd and clip > 0:
            return "a gradient is shortened by the length of all, which comes too late: set max_grad_norm=0"
        return None

    def check_passes(self, rows: int, micro_batch: int) -> None:
        """UserError where a step of so many rows on each rank takes several passes and weights move in each."""
        parts = -(-rows // micro_batch)
        if self.optimizer_in_bwd and parts > 1:
            told = f"gradients of {parts} forward passes would have to be added up: set micro_batch_size to {rows}"
            raise UserError(f"memory.optimizer_in_bwd: {told}")


def call_layer(layer: nn.Module, *inputs: Any) -> Tensor:
    return layer(*inputs)


def selective_checkpoint_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of one operation of a layer: keep what came out, or run it again."""
    name = op.__name__.partition(".")[0].rstrip("_")
    own = op.namespace == "tunekit" and name not in CHEAP
    kept = own or name in PRODUCTS or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


Allowed = Callable[[Tensor | None, Tensor], bool]  # asked with the loss of a step and the length of its gradient


def always(loss: Tensor | None, norm: Tensor) -> bool:
    return True


class TrainOptimizer:
    """One step of the optimizer, when all gradients are there."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float, run: DistributedContext) -> None:
        self.optimizer, self.clip, self.run = optimizer, clip, run
        self.allowed: Allowed = always
        self.weights = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, loss: Tensor | None = None) -> Tensor:
        """Shorten, step, free; the length of the gradient as it was. With the loss of the step more can be judged."""
        all_reduce_tp_gradients(self.weights, self.run)
        norm = total_grad_norm(self.weights, self.run)
        if not self.allowed(loss, norm):
            self.optimizer.zero_grad()  # what has no gradient does not move
        elif self.clip:
            clip_gradients(self.weights, norm, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


class OptimizerInBackward(TrainOptimizer):
    """A step of each weight inside the backward pass: the gradients of a model never exist all at once.

    What was computed with a weight has had its backward pass when the gradient of the weight is whole, so nothing
    reads it any more. The optimizer sees one weight at a time, by groups that hold just that one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, run: DistributedContext) -> None:
        super().__init__(optimizer, 0.0, run)
        self.squares: dict[nn.Parameter, Tensor] = {}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.register_post_accumulate_grad_hook(partial(self.step, group))

    def step(self, group: dict[str, Any], weight: nn.Parameter) -> None:
        assert weight.grad is not None and weight not in self.squares, "one backward pass is one step"
        all_reduce_tp_gradients([weight], self.run)
        self.squares[weight] = grad_square_sum(weight, self.run)
        whole, self.optimizer.param_groups = self.optimizer.param_groups, [group | {"params": [weight]}]
        self.optimizer.step()
        self.optimizer.param_groups = whole
        weight.grad = None

    def __call__(self, loss: Tensor | None = None) -> Tensor:
        """Everything has been done; the length that the gradient had."""
        found = [self.squares[weight] for weight in self.weights if weight in self.squares]
        self.squares.clear()
        self.optimizer.step()  # none has a gradient; the schedule wants to see that steps are taken
        norm = norm_from_squares(found, self.run)
        self.allowed(loss, norm)  # too late for this step, and not for the run
        return norm
