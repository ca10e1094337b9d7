"""Logits of a model whose tensors lie on many ranks: a plain one works in its place, part by part, on the main process.

So they are those of the weights alone, however these are divided, and one part of the model is whole at a time.
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

Ask = Callable[[Decoder, Sequence[Sequence[int]], torch.device], LazyLogits]


def is_fully_local(model: nn.Module) -> bool:
    """Whether all of a model is in the memory of this rank, as one process has it."""
    return all(type(p.data) is Tensor and shard_slice(p).shape == p.shape for p in model.parameters())


@torch.no_grad()
def gathered_logits(
    model: Decoder, plain: Decoder, rows: Sequence[Sequence[int]], run: DistributedContext, asked: Ask = forward_logits
) -> LazyLogits | None:
    """What a question gives, on the main process; the others help. `plain` is the same model before it was divided,
    without numbers: its parts are filled when their turn comes, and emptied behind it."""
    reshard(model)
    tensors = named_tensors(model)
    names = {name: [*submodule_tensors(plain, name)] for name, _ in model_parts(plain)}
    if not run.is_main:
        for name in (name for some in names.values() for name in some):
            full_tensor(tensors[name])
        return None
    with ExitStack() as hooks:
        for name, module in model_parts(plain):
            if module is not plain.head:  # it is asked when the logits are read
                take, drop = partial(fill, plain, tensors, names[name], run), partial(empty, plain, names[name])
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, take=take: take()))
                hooks.enter_context(module.register_forward_hook(lambda *_, drop=drop: drop()))
        found = asked(plain, rows, run.device)
    fill(plain, tensors, names["head"], run)
    return found


def fill(plain: Decoder, tensors: Mapping[str, Tensor], names: list[str], run: DistributedContext) -> None:
    """Give a part of the plain model its numbers, in the order in which all ranks gather them."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        numbers = full_tensor(tensors[name]).to(run.device)
        is_weight = isinstance(tensors[name], nn.Parameter)
        made = nn.Parameter(numbers, requires_grad=False) if is_weight else numbers
        setattr(plain.get_submodule(owner), leaf, made)


def empty(plain: Decoder, names: list[str]) -> None:
    allocate(plain, names, torch.device("meta"))
