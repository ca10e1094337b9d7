"""From a model to a folder that the Hub reads, in the layout, names and dtypes of the checkpoint it came from.

Tensors go to their files one move at a time, so that no more of the model than that is in memory twice.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.checkpoint.atomic import Later, need, refused
from tunekit.checkpoint.folder import INDEX, PICKLE_INDEX, WEIGHTS, Folder, read_json
from tunekit.checkpoint.pieces import at_rest
from tunekit.checkpoint.quantized import PACKED, Packed
from tunekit.checkpoint.tensors import Entries, Reader, Slice, Writer
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import Get, Linear, Stacked
from tunekit.models.weights import Move, Shape, moves_out
from tunekit.parallel.run import Run
from tunekit.parallel.tensors import whole

SHARD = 5 * 10**9  # bytes in one file of a checkpoint that had none before
GENERATION = "generation_config.json"  # how a model writes, with the ids that end a text
# What belongs to a checkpoint beside its weights.
COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*", "USE_POLICY*")
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt")


def write(folder: Path, model: Decoder, source: Folder, quiet: bool = False, run: Run | None = None) -> None:
    """Write a whole model into a folder that is there. What was packed is written plain.

    All ranks take part. Each gathers every tensor of ours, and those of a move are written by one of them in turn.
    """
    run = run or Run(device="cpu")
    at_rest(model)
    going = moves(model, source)
    entries = {name: entry for move in going for name, entry in described(model, move, source)}
    shards = plan(entries, source)
    run.shared(partial(prepare, folder, source, shards, entries))
    later = Later()
    with ExitStack() as opened:
        writers = files(opened, folder, source, shards, entries, made=True)
        kept = opened.enter_context(source.reader()) if source.has_weights else None
        off = quiet or not run.is_main
        for turn, move in enumerate(tqdm(going, "saving", unit="tensor", disable=off or None, leave=False)):
            ours = [dense(model, name).detach() for name in move.ours]
            if turn % run.size == run.rank:
                later(partial(lay, folder, writers, entries, move, ours, kept))
    run.together(later.tell)


def prepare(folder: Path, source: Folder, shards: dict[str, list[str]], entries: Entries) -> None:
    """Everything but the numbers."""
    need(folder, sum(map(size, entries.values())))
    with refused(folder), ExitStack() as opened:
        companions(source.path, folder, skip=unmeant(source), tokenizer=source.words)
        files(opened, folder, source, shards, entries)
        write_index(folder, shards, entries, source)
        write_config(folder, source)


def files(
    opened: ExitStack, folder: Path, source: Folder, shards: dict[str, list[str]], entries: Entries, made: bool = False
) -> dict[str, Writer]:
    """The file of each tensor, open to be written."""
    found: dict[str, Writer] = {}
    for file, names in shards.items():
        some = {name: entries[name] for name in names}
        writer = opened.enter_context(Writer(folder / file, some, as_it_was(source, file), made=made))
        found |= dict.fromkeys(names, writer)
    return found


def lay(
    folder: Path, writers: Mapping[str, Writer], entries: Entries, move: Move, ours: list[Tensor], kept: Reader | None
) -> None:
    """Write the tensors of a move."""
    with refused(folder):
        for name, tensor in hub_tensors(move, ours, kept):
            writers[name][name] = tensor.to(entries[name][1])


def companions(source: Path, target: Path, skip: Iterable[str] = (), tokenizer: Path | None = None) -> None:
    """Copy config, tokenizer, chat template and licence files as they are; the tokenizer's from elsewhere if told."""
    leave = {INDEX, PICKLE_INDEX, *skip}
    if tokenizer is not None:
        copy(tokenizer, target, (*TOKENIZER, GENERATION), leave)
        leave |= {file.name for pattern in TOKENIZER for file in source.glob(pattern)}
    copy(source, target, COMPANIONS, leave)


def unmeant(source: Folder) -> tuple[str, ...]:
    """Files beside a checkpoint that say nothing of it: how to write, where it scores."""
    return () if source.spec.score is None else (GENERATION,)


def copy(source: Path, target: Path, patterns: Iterable[str], leave: set[str]) -> None:
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.name not in leave:
                shutil.copyfile(file, target / file.name)


def moves(model: Decoder, source: Folder) -> list[Move]:
    """How the tensors of a model go out: as they came in, or by the family's table."""
    if source.has_weights:
        return source.all_moves
    held = {name: shape for name, shape in model.shapes.items() if not (source.spec.tied and name == TIED)}
    return moves_out(held, source.family.table)


def described(model: Decoder, move: Move, source: Folder) -> Iterator[tuple[str, tuple[Shape, torch.dtype]]]:
    """Shapes and dtypes of the Hub's tensors of a move: those of the source, or what config.json says."""
    shapes = move.hub_shapes(model.shapes) if move.ours else [source.tensors[name].shape for name in move.hub]
    for name, shape in zip(move.hub, shapes, strict=True):
        yield name, (shape, source.tensors[name].dtype if source.has_weights else source.usual_dtype)


def size(entry: tuple[Shape, torch.dtype]) -> int:
    """Bytes of a tensor."""
    return torch.Size(entry[0]).numel() * entry[1].itemsize


def plan(entries: Entries, source: Folder, shard: int | None = None) -> dict[str, list[str]]:
    """Files and the tensors in each: as in the source, or by size where it has no plain weights."""
    if source.has_weights and not any(isinstance(stored, Packed) for stored in source.tensors.values()):
        shards: dict[str, list[str]] = {}
        for name in entries:
            file = source.tensors[name].file
            usual = file.name if file.suffix != ".bin" else f"{file.stem.removeprefix('pytorch_')}.safetensors"
            shards.setdefault(usual, []).append(name)
        return shards
    parts: list[list[str]] = [[]]
    most = room = shard or SHARD
    for name, entry in entries.items():
        room -= size(entry)
        if room < 0 and parts[-1]:
            parts.append([])
            room = most - size(entry)
        parts[-1].append(name)
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def as_it_was(source: Folder, file: str) -> Path | None:
    """The file of the source whose order and metadata a written one keeps."""
    held = (stored for stored in source.stored.values()) if source.has_weights else ()
    return next((stored.file for stored in held if isinstance(stored, Slice) and stored.file.name == file), None)


def hub_tensors(move: Move, ours: list[Tensor], kept: Reader | None) -> Iterable[tuple[str, Tensor]]:
    """The tensors of one move under their Hub names, as the model has them."""
    if not move.ours:
        assert kept is not None
        return ((name, kept[name]) for name in move.hub)
    return zip(move.hub, move.op.save(ours), strict=True)


def dense(model: Decoder, name: str, get: Get = whole) -> Tensor:
    """A tensor of the model as numbers, whole, whatever the format of its layer."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Linear | Stacked) and leaf == "weight":
        return module.dense(get)
    return get(module.get_parameter(leaf))


def write_index(folder: Path, shards: dict[str, list[str]], entries: Entries, source: Folder) -> None:
    """Which tensor is in which file, and what else the index of the source says. One usual file needs none."""
    if list(shards) == [WEIGHTS]:
        return
    where = {name: file for file, names in shards.items() for name in names}
    told = {} if source.index is None else read_json(source.index)
    if source.index is not None and told["weight_map"] == where:
        shutil.copyfile(source.index, folder / INDEX)
        return
    metadata = (told.get("metadata") or {}) | {"total_size": sum(map(size, entries.values()))}
    (folder / INDEX).write_text(
        json.dumps({"metadata": metadata, "weight_map": where}, indent=2, sort_keys=True) + "\n"
    )


def write_config(folder: Path, source: Folder) -> None:
    """What is otherwise than in the source: packed weights are written plain, and a head may be another one."""
    config = {key: value for key, value in source.config.items() if key != PACKED}
    if config != read_json(source.path / "config.json"):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
