"""From a folder into a model in place, one tensor at a time: the peak is the model and one tensor."""

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.checkpoint.folder import Folder, Reader
from tunekit.errors import UserError
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import Linear
from tunekit.models.weights import Move, hub_name
from tunekit.parallel import put


def read(source: Folder, model: Decoder, quiet: bool = False) -> None:
    """Fill every tensor that a checkpoint of this model holds; what an adapter added is left alone."""
    check(source, model.shapes)
    with source.reader() as tensors:
        for move in tqdm(source.moves, "loading", unit="tensor", disable=quiet or None, leave=False):
            for name, tensor in zip(move.ours, load(move, tensors), strict=True):
                if name == TIED and model.spec.tied:
                    check_tie(source, move, tensors)
                else:
                    fill(model, name, tensor)


def load(move: Move, tensors: Reader) -> list[Tensor]:
    return move.op.load([tensors[name] for name in move.hub])


def fill(model: Decoder, name: str, tensor: Tensor) -> None:
    """A linear layer takes its weight itself, for its format may store it in another way."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Linear) and leaf == "weight":
        module.fill(tensor)
    else:
        put(module.get_parameter(leaf), tensor)


def check(source: Folder, shapes: dict[str, tuple[int, ...]]) -> None:
    """Every tensor of the model is there in its shape, and no other."""
    seen = set()
    for move in source.moves:
        stored = source.tensors[move.hub[0]]
        name = move.ours[0]
        if name not in shapes:
            raise UserError(f"{stored.file}: {move.hub[0]} has no place in the model that config.json describes")
        if stored.shape != shapes[name]:
            has, wants = list(stored.shape), list(shapes[name])
            raise UserError(f"{stored.file}: {move.hub[0]} has the shape {has}, but config.json asks for {wants}")
        seen.add(name)
    optional = {TIED} if source.spec.tied else set()
    if missing := [name for name in shapes if name not in seen | optional]:
        hub = hub_name(missing[0], source.family.table)
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{source.path}: {hub}{more} is missing; the checkpoint is incomplete")


def check_tie(source: Folder, move: Move, tensors: Reader) -> None:
    """A checkpoint may hold its tied head as well, but then it must be the embedding."""
    embedding = next(m.hub[0] for m in source.moves if m.ours[0] == "embed.weight")
    if not torch.equal(tensors[move.hub[0]], tensors[embedding]):
        raise UserError(
            f"{source.path}: config.json ties the head to the embedding, but {move.hub[0]} differs from {embedding}; "
            "set tie_word_embeddings to false"
        )
