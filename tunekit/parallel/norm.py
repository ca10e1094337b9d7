"""The length of a gradient that lies on many ranks, each number counted once."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tunekit.devices import accumulation_dtype
from tunekit.parallel.run import Run
from tunekit.parallel.tensors import local, splits_of

PART = 4096  # numbers that are added up in their own precision: more of them lose digits (1.6e-3 of 33 M on a CPU)


def length(weights: Iterable[Tensor], run: Run) -> Tensor:
    """Of the gradients of these weights, as one vector."""
    return root([squares(weight, run) for weight in weights if weight.grad is not None], run)


def root(found: list[Tensor], run: Run) -> Tensor:
    """The length of a vector, from the squares of its parts on each rank."""
    found = found or [torch.zeros((), dtype=accumulation_dtype(run.device), device=run.device)]
    return run.over_all(torch.stack(found).sum()).sqrt().float()


@torch.no_grad()
def shorten(weights: Iterable[Tensor], norm: Tensor, most: float) -> None:
    """Make gradients of this length no longer than `most`, as torch.nn.utils.clip_grad_norm_ does."""
    share = (most / (norm + 1e-6)).clamp(max=1.0)
    for weight in weights:
        if weight.grad is not None:
            local(weight.grad).mul_(share.to(weight.grad.dtype))


@torch.no_grad()
def squares(weight: Tensor, run: Run) -> Tensor:
    """The sum of the squares of what this rank counts of a weight's gradient, in fp64 where it exists.

    Some thousand numbers at a time are added up in fp32, which a CPU does fast and exactly enough.
    """
    assert weight.grad is not None
    if not counts(weight, run.place.tensor):
        return local(weight.grad).new_zeros((), dtype=accumulation_dtype(weight.device))
    flat = local(weight.grad).reshape(-1).float()
    body, rest = flat[: len(flat) // PART * PART].view(-1, PART), flat[len(flat) // PART * PART :]
    norms, wide = torch.linalg.vector_norm(body, dim=1), accumulation_dtype(flat.device)
    return norms.to(wide).square().sum() + rest.to(wide).square().sum()


def counts(weight: Tensor, tensor: int) -> bool:
    """Whether this rank counts its part of a weight, which others may have too.

    `tensor` is its place among those that share layers: what is not split over them is counted by the first.
    """
    if tensor and not any(split.kind == "tensor" for split in splits_of(weight)):
        return False
    if not isinstance(weight, DTensor):
        return True
    where = weight.device_mesh.get_coordinate()
    assert where is not None, "a rank has no part in a mesh that it is not in"
    return all(isinstance(kind, Shard) or at == 0 for kind, at in zip(weight.placements, where, strict=True))
