"""Norm of sharded gradients, with each element counted once, and gradient clipping."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tunekit.devices import accumulation_dtype
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import shards_of, to_local

SUM_BLOCK = 4096  # elements summed in fp32; more lose precision (relative error 1.6e-3 for 33 M on a CPU)


def total_grad_norm(parameters: Iterable[Tensor], context: DistributedContext) -> Tensor:
    """Norm of all gradients as one vector: fp32, on the device of the context."""
    weights = [weight for weight in parameters if weight.grad is not None]
    return norm_from_squares(partial_squares(weights, context), context)


def norm_from_squares(partial_sums: Sequence[Tensor], context: DistributedContext) -> Tensor:
    """Square root of the sum of 0-dim fp64 tensors over all ranks. Those of offloaded gradients are on the CPU."""
    totals = [torch.stack(sums).sum().to(context.device) for sums in group_by_device_and_dtype(partial_sums)]
    zero = torch.zeros((), dtype=accumulation_dtype(context.device), device=context.device)
    return context.all_reduce_world(sum(totals, start=zero)).sqrt().float()


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], grad_norm: Tensor, max_norm: float) -> None:
    """Scale gradients with norm `grad_norm` to at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    local_grads = [to_local(require_grad(weight)) for weight in parameters if weight.grad is not None]
    for grads in group_by_device_and_dtype(local_grads):
        factors = factor.to(grads[0].device, grads[0].dtype)
        torch._foreach_mul_(grads, factors)  # pyright: ignore[reportPrivateImportUsage]


def grad_square_sum(weight: Tensor, context: DistributedContext) -> Tensor:
    """Sum of squares of the gradient elements of a parameter that this rank counts, in fp64."""
    (total,) = partial_squares([weight], context)
    return total


@torch.no_grad()
def partial_squares(parameters: Sequence[Tensor], context: DistributedContext) -> list[Tensor]:
    """Sums of squares in fp64 that add up to that of all gradients: one per parameter on the CPU, else one per dtype.

    On a GPU, `_foreach_norm` accumulates in blocks and needs a few launches for the 448 factors of a LoRA instead of 8
    for each. On the CPU it accumulates sequentially, which loses precision.
    """
    on_host, on_device = [], []
    for weight in parameters:
        if require_grad(weight).device.type == "cpu":
            on_host.append(squares_in_blocks(weight, context))
        elif counts_locally(weight, context):
            on_device.append(to_local(require_grad(weight)))
    sums = [*on_host, *(squares_of(grads) for grads in group_by_device_and_dtype(on_device))]
    return sums or [torch.zeros((), dtype=accumulation_dtype(context.device), device=context.device)]


def squares_of(grads: list[Tensor]) -> Tensor:
    """Sum of squares of tensors with the same device and dtype, in fp64."""
    norms = torch.stack(torch._foreach_norm(grads, 2, torch.float32))  # pyright: ignore[reportPrivateImportUsage]
    return norms.to(accumulation_dtype(norms.device)).square().sum()


def squares_in_blocks(weight: Tensor, context: DistributedContext) -> Tensor:
    """Sum of squares of the elements of one gradient that this rank counts, in fp64. Blocks are summed in fp32, which
    is fast on a CPU and accurate enough."""
    grad = to_local(require_grad(weight))
    if not counts_locally(weight, context):
        return grad.new_zeros((), dtype=accumulation_dtype(weight.device))
    flat, wide = grad.reshape(-1).float(), accumulation_dtype(weight.device)
    num_full = len(flat) // SUM_BLOCK * SUM_BLOCK
    # Sums of empty tensors would launch kernels, too.
    if num_full == 0:
        return flat.to(wide).square().sum()
    total = torch.linalg.vector_norm(flat[:num_full].view(-1, SUM_BLOCK), dim=1).to(wide).square().sum()
    return total if num_full == len(flat) else total + flat[num_full:].to(wide).square().sum()


def require_grad(weight: Tensor) -> Tensor:
    """Gradient of a parameter that has one."""
    assert weight.grad is not None
    return weight.grad


def group_by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Non-empty tensors, grouped by device and dtype in order of appearance."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def counts_locally(weight: Tensor, context: DistributedContext) -> bool:
    """Whether this rank counts its shard of a parameter. Replicated parameters are counted by the first rank."""
    if context.coords.tensor and not any(shard.kind == "tensor" for shard in shards_of(weight)):
        return False
    if not isinstance(weight, DTensor):
        return True
    coordinate = weight.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of the parameter"
    pairs = zip(weight.placements, coordinate, strict=True)
    return all(isinstance(placement, Shard) or index == 0 for placement, index in pairs)
