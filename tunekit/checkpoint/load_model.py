"""From a folder into a model in place, one tensor at a time: the peak is the model and one tensor."""

import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, TensorReader
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import ShardSlice, adopt_tensor, shard_slice, to_local, upload
from tunekit.errors import UserError
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.weight_map import KeyMapping, Shape, Stack, to_hub_name

Place = tuple[int, ...]
Get = Callable[[str], Tensor]  # a tensor of the Hub
Give = Callable[[str, Tensor], None]  # takes one of ours
Seen = Callable[[str, Place, Tensor], None]


def load_weights(
    source: HFCheckpoint, model: Decoder, quiet: bool = False, run: DistributedContext | None = None
) -> None:
    """Fill every tensor that a checkpoint of this model holds; what an adapter added is left alone.

    A rank reads what it keeps: files are mapped, and of a part that is not touched no byte is read.
    """
    run = run or DistributedContext(device="cpu")
    check_tensors(source, model.shapes)
    odd: dict[tuple[str, Place], int] = {}
    with source.reader() as tensors:

        def seen(name: str, place: Place, numbers: Tensor) -> None:
            if count := not_finite(numbers):
                odd[name, place] = count

        off = quiet or not run.is_main
        for move in tqdm(key_mappings(source, model), "loading", unit="tensor", disable=off or None, leave=False):
            if TIED in move.ours and model.spec.tied:
                check_tied_head(source, move, tensors)
            else:
                apply_mapping(model, move, tensors.lend, partial(load_tensor, model), seen)
    odd = {key: count for one in run.gather(odd) for key, count in one.items()}
    if odd and not off:
        tell_of(odd, source)


def key_mappings(source: HFCheckpoint, model: Decoder) -> list[KeyMapping]:
    """How the tensors of a checkpoint come in. A head that is the embedding there and not here begins as a copy."""
    found = source.moves
    if model.spec.tied or any(TIED in move.ours for move in found):
        return found
    return [*found, *(KeyMapping((TIED,), move.hub, move.op) for move in found if move.ours == ("embed.weight",))]


def unseen(name: str, place: Place, numbers: Tensor) -> None:
    """Nobody looks."""


def apply_mapping(model: Decoder, move: KeyMapping, get: Get, give: Give, seen: Seen = unseen) -> None:
    """Hand over what a move makes of the tensors of a checkpoint. Of a stack of experts only those are read, one by
    one, that are kept here.

    `seen` looks at all that is read. What a layer packs is read whole.
    """
    if isinstance(move.op, Stack) and (stack := parameter(model, move.ours[0])) is not None:
        box = shard_slice(stack)
        for number, expert in enumerate(to_local(stack.detach()), start=box.offset[0]):
            numbers = ShardSlice(box.shape[1:], box.offset[1:]).of(get(move.hub[number]), expert.shape)
            seen(move.hub[number], box.offset[1:], numbers)
            upload(expert, numbers)
        return
    for name, tensor in zip(move.ours, move.load([get(name) for name in move.hub], model.shapes), strict=True):
        target = parameter(model, name)
        place, numbers = (), tensor
        if target is not None:
            place, numbers = shard_slice(target).offset, shard_slice(target).of(tensor, to_local(target).shape)
        seen(move.hub[0], (*place, move.ours.index(name)), numbers)
        give(name, tensor)


def parameter(model: Decoder, name: str) -> nn.Parameter | None:
    """A tensor that is kept as numbers: a layer may store its weight in another way."""
    owner, _, leaf = name.rpartition(".")
    return dict(model.get_submodule(owner).named_parameters(recurse=False)).get(leaf)


def load_tensor(model: Decoder, name: str, tensor: Tensor) -> None:
    """A linear layer takes its weight itself, for its format may store it in another way."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Linear | GroupedLinear) and leaf == "weight":
        module.fill(tensor)
    else:
        adopt_tensor(module.get_parameter(leaf), tensor)


def not_finite(tensor: Tensor) -> int:
    """How many numbers are NaN or infinite. One makes the sum so, and a sum takes 0.05 s a gigabyte, a count 3 s."""
    return 0 if tensor.sum().isfinite() else int((~tensor.isfinite()).sum())


def tell_of(odd: Mapping[tuple[str, Place], int], source: HFCheckpoint) -> None:
    """Warn of a checkpoint that was damaged when it was made; what comes out of it is most likely NaN."""
    name, *others = sorted({name for name, _ in odd}, key=[*source.tensors].index)
    where = f"{name}{f' and {len(others)} more tensors' if others else ''}"
    told = f"warning: {source.tensors[name].file}: {sum(odd.values())} weights are NaN or infinite, in {where}"
    tqdm.write(told, file=sys.stderr)


def check_tensors(source: HFCheckpoint, shapes: Mapping[str, Shape]) -> None:
    """Every tensor of the model is there in its shape, and no other."""
    seen = set()
    for move in source.moves:
        first = source.tensors[move.hub[0]]
        if lost := [name for name in move.ours if name not in shapes]:
            has = "has" if len(lost) == len(move.ours) else f"has a part ({lost[0]}) that has"
            raise UserError(f"{first.file}: {move.hub[0]} {has} no place in the model that config.json describes")
        check_shapes(source, move, shapes)
        seen.update(move.ours)
    optional = {TIED} if source.spec.tied else set()
    if missing := [name for name in shapes if name not in seen | optional]:
        hub = to_hub_name(missing[0], source.family.table)
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{source.path}: {hub}{more} is missing; the checkpoint is incomplete")


def check_shapes(source: HFCheckpoint, move: KeyMapping, shapes: Mapping[str, Shape]) -> None:
    """The tensors of one move are those, in number and shape, that our tensors would become."""
    wanted = move.hub_shapes(shapes)
    for name, wants in zip(move.hub, wanted, strict=False):
        stored = source.tensors[name]
        if stored.shape != wants:
            has = f"has the shape {list(stored.shape)}, but config.json asks for {list(wants)}"
            raise UserError(f"{stored.file}: {name} {has}")
    if len(move.hub) != len(wanted):
        there = source.tensors[move.hub[-1]]
        raise UserError(
            f"{there.file}: {move.hub[-1]} is the last of {len(move.hub)}, but config.json asks for {len(wanted)}"
        )


def check_tied_head(source: HFCheckpoint, move: KeyMapping, tensors: TensorReader) -> None:
    """A checkpoint may hold its tied head as well, but then it must be the embedding."""
    embedding = next(m.hub[0] for m in source.moves if m.ours[0] == "embed.weight")
    if not torch.equal(tensors.lend(move.hub[0]), tensors.lend(embedding)):
        raise UserError(
            f"{source.path}: config.json ties the head to the embedding, but {move.hub[0]} differs from {embedding}; "
            "set tie_word_embeddings to false"
        )
