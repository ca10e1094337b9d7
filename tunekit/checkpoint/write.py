"""From a model to a folder that the Hub reads, in the layout, names and dtypes of the checkpoint it came from."""

import json
import shutil
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tunekit.checkpoint.atomic import need
from tunekit.checkpoint.folder import INDEX, WEIGHTS, Folder, read_json
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import Linear
from tunekit.models.weights import Move, moves_out

SHARD = 5 * 10**9  # bytes in one file of a checkpoint that had none before
# What belongs to a checkpoint beside its weights.
COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*", "USE_POLICY*")


def write(folder: Path, model: Decoder, source: Folder, quiet: bool = False) -> None:
    """Write a whole model into a folder that is there."""
    shards, going = plan(model, source), moves(model, source)
    total = sum(size for move in going for size in sizes(model, move, source))
    need(folder, total)
    companions(source.path, folder)
    for file, names in tqdm(shards.items(), "saving", unit="file", disable=quiet or None, leave=False):
        wanted = set(names)
        tensors = {name: t for move in going for name, t in hub_tensors(model, move, source, wanted)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if list(shards) != [WEIGHTS]:
        write_index(folder, shards, total, source)


def companions(source: Path, target: Path, skip: Iterable[str] = (INDEX,)) -> None:
    """Copy config, tokenizer, chat template and licence files as they are."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.name not in skip:
                shutil.copyfile(file, target / file.name)


def plan(model: Decoder, source: Folder) -> dict[str, list[str]]:
    """Files and the tensors in each: as in the source, or by size where the source has no weights."""
    if source.has_weights:
        shards: dict[str, list[str]] = {}
        for move in source.all_moves:
            for name in move.hub:
                shards.setdefault(source.tensors[name].file.name, []).append(name)
        return shards
    parts: list[list[str]] = [[]]
    room = SHARD
    for move in moves(model, source):
        for name, size in zip(move.hub, sizes(model, move, source), strict=True):
            room -= size
            if room < 0 and parts[-1]:
                parts.append([])
                room = SHARD - size
            parts[-1].append(name)
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def moves(model: Decoder, source: Folder) -> list[Move]:
    """How the tensors of a model go out: as they came in, or by the family's table."""
    if source.has_weights:
        return source.all_moves
    held = {name: shape for name, shape in model.shapes.items() if not (source.spec.tied and name == TIED)}
    return moves_out(held, source.family.table)


def dtype(move: Move, name: str, source: Folder) -> torch.dtype:
    """In which one of the Hub's tensors is written."""
    return source.tensors[name].dtype if source.has_weights else source.dtype(move.ours[0])


def sizes(model: Decoder, move: Move, source: Folder) -> list[int]:
    """Bytes on disk of each tensor of a move."""
    if not move.ours:
        return [prod(source.tensors[name].shape) * source.tensors[name].dtype.itemsize for name in move.hub]
    shapes = move.hub_shapes(model.shapes)
    return [prod(s) * dtype(move, n, source).itemsize for n, s in zip(move.hub, shapes, strict=True)]


def hub_tensors(model: Decoder, move: Move, source: Folder, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Those tensors of one move that are `wanted`, on the CPU, in the dtype of the source."""
    if wanted.isdisjoint(move.hub):
        return
    if not move.ours:
        with source.reader() as kept:
            yield from ((name, kept[name]) for name in move.hub)
        return
    ours = [dense(model, name).detach().to("cpu", source.dtype(name)) for name in move.ours]
    for name, tensor in zip(move.hub, move.op.save(ours), strict=True):
        if name in wanted:
            # A tied head shares the memory of the embedding, and a file holds no tensor twice.
            made = tensor.to(dtype(move, name, source))
            yield name, made.clone() if TIED in move.ours or len(move.hub) > 1 else made.contiguous()


def dense(model: Decoder, name: str) -> Tensor:
    """A tensor of the model as numbers, whatever the format of its layer."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return module.dense() if isinstance(module, Linear) and leaf == "weight" else module.get_parameter(leaf)


def write_index(folder: Path, shards: dict[str, list[str]], total: int, source: Folder) -> None:
    """Which tensor is in which file, and what else the index of the source says."""
    told = read_json(source.path / INDEX).get("metadata") if (source.path / INDEX).is_file() else None
    where = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": (told or {}) | {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
