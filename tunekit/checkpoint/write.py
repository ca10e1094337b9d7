"""From a model to a folder that the Hub reads, in the layout, names and dtypes of the checkpoint it came from."""

import json
import shutil
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tunekit.checkpoint.atomic import need, whole
from tunekit.checkpoint.folder import INDEX, WEIGHTS, Folder, read_json
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import Linear
from tunekit.models.weights import Move, moves_out

SHARD = 5 * 10**9  # bytes in one file of a checkpoint that had none before
# What belongs to a checkpoint beside its weights.
COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*", "USE_POLICY*")


def write(out: Path, model: Decoder, source: Folder, quiet: bool = False) -> None:
    """Write a whole model as the folder `out`: it appears complete or not at all."""
    shards = plan(model, source)
    need(out, sum(size(model, move, source) for moves in shards.values() for move in moves))
    with whole(out) as folder:
        companions(source.path, folder)
        for file, moves in tqdm(shards.items(), "saving", unit="file", disable=quiet or None, leave=False):
            tensors = {name: t for move in moves for name, t in hub_tensors(model, move, source)}
            save_file(tensors, folder / file, metadata={"format": "pt"})
        if list(shards) != [WEIGHTS]:
            write_index(folder, model, shards, source)


def companions(source: Path, target: Path, skip: Iterable[str] = (INDEX,)) -> None:
    """Copy config, tokenizer, chat template and licence files as they are."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.name not in skip:
                shutil.copyfile(file, target / file.name)


def plan(model: Decoder, source: Folder) -> dict[str, list[Move]]:
    """Files and what goes into each: as in the source, or by size where the source has no weights."""
    if source.has_weights:
        shards: dict[str, list[Move]] = {}
        for move in source.moves:
            shards.setdefault(source.tensors[move.hub[0]].file.name, []).append(move)
        return shards
    names = [name for name in model.shapes if not (source.spec.tied and name == TIED)]
    parts: list[list[Move]] = [[]]
    room = SHARD
    for move in moves_out(names, source.family.table):
        room -= size(model, move, source)
        if room < 0 and parts[-1]:
            parts.append([])
            room = SHARD - size(model, move, source)
        parts[-1].append(move)
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def size(model: Decoder, move: Move, source: Folder) -> int:
    """Bytes on disk."""
    return sum(prod(model.shapes[name]) * source.dtype(name).itemsize for name in move.ours)


def hub_tensors(model: Decoder, move: Move, source: Folder) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one move under their Hub names, on the CPU, in the dtype of the source."""
    ours = [dense(model, name).detach().to("cpu", source.dtype(name)) for name in move.ours]
    for name, tensor in zip(move.hub, move.op.save(ours), strict=True):
        # A tied head shares the memory of the embedding, and a file holds no tensor twice.
        yield name, tensor.clone() if TIED in move.ours else tensor.contiguous()


def dense(model: Decoder, name: str) -> Tensor:
    """A tensor of the model as numbers, whatever the format of its layer."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return module.dense() if isinstance(module, Linear) and leaf == "weight" else module.get_parameter(leaf)


def write_index(folder: Path, model: Decoder, shards: dict[str, list[Move]], source: Folder) -> None:
    """Which tensor is in which file, and what else the index of the source says."""
    told = read_json(source.path / INDEX).get("metadata") if (source.path / INDEX).is_file() else None
    total = sum(size(model, move, source) for moves in shards.values() for move in moves)
    where = {name: file for file, moves in shards.items() for move in moves for name in move.hub}
    index = {"metadata": (told or {}) | {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
