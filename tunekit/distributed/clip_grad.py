"""The norm of a gradient that is divided over ranks, each number counted once, and clipping by it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tunekit.devices import accumulation_dtype
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import shards_of, to_local

SUM_BLOCK = 4096  # numbers that are added up in their own precision: more of them lose digits (1.6e-3 of 33 M on a CPU)


def total_grad_norm(parameters: Iterable[Tensor], context: DistributedContext) -> Tensor:
    """Norm of the gradients of these weights as one vector: fp32, on the device of the run."""
    return norm_from_squares(
        partial_squares([weight for weight in parameters if weight.grad is not None], context), context
    )


def norm_from_squares(partial_sums: Sequence[Tensor], context: DistributedContext) -> Tensor:
    """Square root of the sum of 0-dim fp64 tensors over all ranks. Those of offloaded gradients are on the CPU."""
    totals = [torch.stack(sums).sum().to(context.device) for sums in group_by_device_and_dtype(partial_sums)]
    zero = torch.zeros((), dtype=accumulation_dtype(context.device), device=context.device)
    return context.all_reduce_world(sum(totals, start=zero)).sqrt().float()


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], grad_norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm to a norm of at most `most`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    for grads in group_by_device_and_dtype(
        [to_local(require_grad(weight)) for weight in parameters if weight.grad is not None]
    ):
        factors = factor.to(grads[0].device, grads[0].dtype)
        torch._foreach_mul_(grads, factors)  # pyright: ignore[reportPrivateImportUsage]


def grad_square_sum(weight: Tensor, context: DistributedContext) -> Tensor:
    """Sum of the squares of the numbers of a weight's gradient that this rank counts, in fp64."""
    (total,) = partial_squares([weight], context)
    return total


@torch.no_grad()
def partial_squares(parameters: Sequence[Tensor], context: DistributedContext) -> list[Tensor]:
    """Sums of squares in fp64 that add up to that of the gradients: one for each weight on the CPU, else one for all
    tensors of a dtype.

    On a GPU `_foreach_norm` adds up in blocks, and takes a handful of launches for the 448 factors of a LoRA instead of
    8 for each of them. On the CPU it would add up one number after the other.
    """
    on_host, on_device = [], []
    for weight in parameters:
        if require_grad(weight).device.type == "cpu":
            on_host.append(squares_in_blocks(weight, context))
        elif counts_locally(weight, context.coords.tensor):
            on_device.append(to_local(require_grad(weight)))
    sums = [*on_host, *(squares_of(grads) for grads in group_by_device_and_dtype(on_device))]
    return sums or [torch.zeros((), dtype=accumulation_dtype(context.device), device=context.device)]


def squares_of(grads: list[Tensor]) -> Tensor:
    """Sum of the squares of tensors of one device and dtype, in fp64."""
    norms = torch.stack(torch._foreach_norm(grads, 2, torch.float32))  # pyright: ignore[reportPrivateImportUsage]
    return norms.to(accumulation_dtype(norms.device)).square().sum()


def squares_in_blocks(weight: Tensor, context: DistributedContext) -> Tensor:
    """Sum of the squares of what this rank counts of one gradient, in fp64: blocks of some thousand numbers are added
    up in fp32, which a CPU does fast and exactly enough."""
    grad = to_local(require_grad(weight))
    if not counts_locally(weight, context.coords.tensor):
        return grad.new_zeros((), dtype=accumulation_dtype(weight.device))
    flat = grad.reshape(-1).float()
    body, remainder = (
        flat[: len(flat) // SUM_BLOCK * SUM_BLOCK].view(-1, SUM_BLOCK),
        flat[len(flat) // SUM_BLOCK * SUM_BLOCK :],
    )
    norms, wide = torch.linalg.vector_norm(body, dim=1), accumulation_dtype(flat.device)
    return norms.to(wide).square().sum() + remainder.to(wide).square().sum()


def require_grad(weight: Tensor) -> Tensor:
    """Gradient of a weight that has one."""
    assert weight.grad is not None
    return weight.grad


def group_by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Non-empty tensors in lists of one device and dtype, in the order in which they come."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def counts_locally(weight: Tensor, tp_rank: int) -> bool:
    """Whether this rank counts its part of a weight, which others may have too.

    `tensor` is its place among those that share layers: what is not split over them is counted by the first.
    """
    if tp_rank and not any(shard.kind == "tensor" for shard in shards_of(weight)):
        return False
    if not isinstance(weight, DTensor):
        return True
    coordinate = weight.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank has no part in a mesh that it is not in"
    return all(
        isinstance(placement, Shard) or index == 0
        for placement, index in zip(weight.placements, coordinate, strict=True)
    )
