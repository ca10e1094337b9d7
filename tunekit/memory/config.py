"""Options that trade compute for memory: activation checkpointing, offloading, and updates in the backward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tunekit import devices
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.memory.activation_offloading import ActivationOffloader
from tunekit.models.decoder import Decoder
from tunekit.optim.train_optimizer import OptimizerInBackward, TrainOptimizer

CPU = torch.device("cpu")
# `selective` keeps the outputs of matmuls and attention, and recomputes norms, RoPE and activations.
MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
CHEAP = {"rms_norm", "rope", "gated_activation"}  # names of custom ops that are recomputed

NO_LOSS_SCALING = "not compatible with the loss scaling of fp16. Set precision.compute_dtype=fp32."


@dataclass(frozen=True)
class MemoryConfig:
    # full: keep only the input of each layer and recompute the layer in the backward pass; selective: also keep matmul
    # and attention outputs; recompute norms, RoPE and activations
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    activation_offloading: bool = False  # Keep saved activations in host memory until the backward pass; GPU only
    optimizer_in_bwd: bool = False  # Update each weight as soon as its gradient is ready, then free the gradient

    def check(self, device: torch.device) -> None:
        """Raise UserError if the device does not support an option."""
        if self.activation_offloading and not devices.device_capabilities(device).own_memory:
            raise UserError(
                f"memory.activation_offloading: requires a device with its own memory, got {device.type}. "
                "Set memory.activation_offloading=false."
            )

    def apply(self, model: Decoder, device: torch.device = CPU) -> None:
        """Set how the model runs its layers when gradients are required."""
        self.check(device)
        model.layer_call = self.through()
        if self.activation_offloading:
            model.layer_call = ActivationOffloader(model).wrap_layer_call(model.layer_call or nn.Module.__call__)

    def through(self) -> Callable[..., Tensor] | None:
        """The function that calls a layer when gradients are required; None: call it directly."""
        if self.activation_checkpointing == "none":
            return None
        run_checkpointed = partial(checkpoint, use_reentrant=False)
        if self.activation_checkpointing == "selective":
            # In-place ops on a kept output are kept too, so that recomputation does not apply them twice.
            contexts = partial(
                create_selective_checkpoint_contexts, selective_checkpoint_policy, allow_cache_entry_mutation=True
            )
            return partial(run_checkpointed, context_fn=contexts)
        return run_checkpointed

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, dist: DistributedContext) -> TrainOptimizer:
        """The optimizer for a training loop, with updates in the backward pass if the config asks for them."""
        return (OptimizerInBackward if self.optimizer_in_bwd else TrainOptimizer)(optimizer, dist)

    def check_clipping(self, max_grad_norm: float) -> None:
        """Raise FieldError if gradients are to be clipped: with optimizer_in_bwd the norm is known too late."""
        if self.optimizer_in_bwd and max_grad_norm > 0:
            raise FieldError("memory.optimizer_in_bwd", "not compatible with gradient clipping. Set max_grad_norm=0.")

    def check_loss_scaling(self) -> None:
        """Raise FieldError if gradients are to be unscaled: with optimizer_in_bwd, overflows are known too late."""
        if self.optimizer_in_bwd:
            raise FieldError("memory.optimizer_in_bwd", NO_LOSS_SCALING)

    def check_num_micro_batches(self, rows: int, micro_batch_size: int) -> None:
        """Raise UserError if a step of `rows` rows per rank needs gradient accumulation with optimizer_in_bwd."""
        num_micro_batches = -(-rows // micro_batch_size)
        if self.optimizer_in_bwd and num_micro_batches > 1:
            raise UserError(
                f"memory.optimizer_in_bwd: not compatible with gradient accumulation (a step has {num_micro_batches} "
                f"micro-batches). Set micro_batch_size={rows}."
            )


def selective_checkpoint_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the output of this operation, or recompute it in the backward pass."""
    name = op.__name__.partition(".")[0].rstrip("_")
    is_custom_matmul = op.namespace == "tunekit" and name not in CHEAP
    keep = is_custom_matmul or name in MATMULS or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
