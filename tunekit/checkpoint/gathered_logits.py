"""Logits of a sharded model, computed on the main process by an unsharded copy that is filled layer by layer.

They depend on the weights only, not on the parallel layout, and only one layer is in memory in full at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.layerwise_forward import (
    LazyLogits,
    allocate,
    forward_logits,
    model_parts,
    named_tensors,
    submodule_tensors,
)
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import full_tensor, shard_slice
from tunekit.models.decoder import Decoder

LogitsFn = Callable[[Decoder, Sequence[Sequence[int]], torch.device], LazyLogits]


def is_fully_local(model: nn.Module) -> bool:
    """Whether all parameters are unsharded tensors on this rank."""
    return all(type(p.data) is Tensor and shard_slice(p).shape == p.shape for p in model.parameters())


@torch.no_grad()
def gathered_logits(
    model: Decoder,
    meta_model: Decoder,
    rows: Sequence[Sequence[int]],
    run: DistributedContext,
    logits_fn: LogitsFn = forward_logits,
) -> LazyLogits | None:
    """Return the result of `logits_fn` on the main process, None on other ranks. Must be called on all ranks.

    `meta_model` is the unsharded model on the meta device. Its layers are filled before and freed after their forward.
    """
    reshard(model)
    tensors = named_tensors(model)
    names = {name: [*submodule_tensors(meta_model, name)] for name, _ in model_parts(meta_model)}
    if not run.is_main_process:
        for name in (name for part_names in names.values() for name in part_names):
            full_tensor(tensors[name])
        return None
    with ExitStack() as hooks:
        for name, module in model_parts(meta_model):
            if module is not meta_model.head:  # computed when the logits are read
                load, free = (
                    partial(fill_part, meta_model, tensors, names[name], run),
                    partial(free_part, meta_model, names[name]),
                )
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, load=load: load()))
                hooks.enter_context(module.register_forward_hook(lambda *_, free=free: free()))
        logits = logits_fn(meta_model, rows, run.device)
    fill_part(meta_model, tensors, names["head"], run)
    return logits


def fill_part(model: Decoder, tensors: Mapping[str, Tensor], names: list[str], run: DistributedContext) -> None:
    """Gather the tensors of one part of the model, in the same order on all ranks."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        values = full_tensor(tensors[name]).to(run.device)
        is_weight = isinstance(tensors[name], nn.Parameter)
        tensor = nn.Parameter(values, requires_grad=False) if is_weight else values
        setattr(model.get_submodule(owner), leaf, tensor)


def free_part(model: Decoder, names: list[str]) -> None:
    allocate(model, names, torch.device("meta"))
