"""The optimizer's part of a training step, as in the recipes."""

from torch import Tensor

from tunekit.optim.train_optimizer import TrainOptimizer


def step_optimizer(optimizer: TrainOptimizer, max_grad_norm: float) -> Tensor:
    """Clip, step, zero the gradients; return the gradient norm."""
    grad_norm = optimizer.clip_grad_norm(max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm
