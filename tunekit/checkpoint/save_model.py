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

from tunekit.checkpoint.atomic import DeferredError, check_free_space, wrap_write_errors
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.dequantize import PACKED, PrequantizedTensor
from tunekit.checkpoint.hf_checkpoint import INDEX, PICKLE_INDEX, WEIGHTS, HFCheckpoint, read_json
from tunekit.checkpoint.safetensors_io import Entries, SafetensorsWriter, TensorReader, TensorSlice
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import full_tensor
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import Get, GroupedLinear, Linear
from tunekit.models.weight_map import KeyMapping, Shape, save_mappings

SHARD = 5 * 10**9  # bytes in one file of a checkpoint that had none before
GENERATION = "generation_config.json"  # how a model writes, with the ids that end a text
# What belongs to a checkpoint beside its weights.
COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*", "USE_POLICY*")
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt")


def save_model(
    folder: Path, model: Decoder, source: HFCheckpoint, quiet: bool = False, run: DistributedContext | None = None
) -> None:
    """Write a whole model into a folder that is there. What was packed is written plain.

    All ranks take part. Each gathers every tensor of ours, and those of a move are written by one of them in turn.
    """
    run = run or DistributedContext(device="cpu")
    reshard(model)
    going = moves(model, source)
    entries = {name: entry for move in going for name, entry in described(model, move, source)}
    shards = plan_shards(entries, source)
    run.shared(partial(prepare, folder, source, shards, entries))
    later = DeferredError()
    with ExitStack() as opened:
        writers = files(opened, folder, source, shards, entries, made=True)
        kept = opened.enter_context(source.reader()) if source.has_weights else None
        off = quiet or not run.is_main
        for turn, move in enumerate(tqdm(going, "saving", unit="tensor", disable=off or None, leave=False)):
            ours = [full_weight(model, name).detach() for name in move.ours]
            if turn % run.size == run.rank:
                later(partial(lay, folder, writers, entries, move, ours, kept))
    run.together(later.tell)


def prepare(folder: Path, source: HFCheckpoint, shards: dict[str, list[str]], entries: Entries) -> None:
    """Everything but the numbers."""
    check_free_space(folder, sum(map(tensor_bytes, entries.values())))
    with wrap_write_errors(folder), ExitStack() as opened:
        copy_companion_files(source.path, folder, skip=unrelated_files(source), tokenizer=source.words)
        files(opened, folder, source, shards, entries)
        write_index(folder, shards, entries, source)
        write_config(folder, source)


def files(
    opened: ExitStack,
    folder: Path,
    source: HFCheckpoint,
    shards: dict[str, list[str]],
    entries: Entries,
    made: bool = False,
) -> dict[str, SafetensorsWriter]:
    """The file of each tensor, open to be written."""
    found: dict[str, SafetensorsWriter] = {}
    for file, names in shards.items():
        some = {name: entries[name] for name in names}
        writer = opened.enter_context(SafetensorsWriter(folder / file, some, source_layout(source, file), made=made))
        found |= dict.fromkeys(names, writer)
    return found


def lay(
    folder: Path,
    writers: Mapping[str, SafetensorsWriter],
    entries: Entries,
    move: KeyMapping,
    ours: list[Tensor],
    kept: TensorReader | None,
) -> None:
    """Write the tensors of a move."""
    with wrap_write_errors(folder):
        for name, tensor in hub_tensors(move, ours, kept):
            writers[name][name] = tensor.to(entries[name][1])


def copy_companion_files(source: Path, target: Path, skip: Iterable[str] = (), tokenizer: Path | None = None) -> None:
    """Copy config, tokenizer, chat template and licence files as they are; the tokenizer's from elsewhere if told."""
    leave = {INDEX, PICKLE_INDEX, *skip}
    if tokenizer is not None:
        copy(tokenizer, target, (*TOKENIZER, GENERATION), leave)
        leave |= {file.name for pattern in TOKENIZER for file in source.glob(pattern)}
    copy(source, target, COMPANIONS, leave)


def unrelated_files(source: HFCheckpoint) -> tuple[str, ...]:
    """Files beside a checkpoint that say nothing of it: how to write, where it scores."""
    return () if source.spec.score is None else (GENERATION,)


def copy(source: Path, target: Path, patterns: Iterable[str], leave: set[str]) -> None:
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.name not in leave:
                shutil.copyfile(file, target / file.name)


def moves(model: Decoder, source: HFCheckpoint) -> list[KeyMapping]:
    """How the tensors of a model go out: as they came in, or by the family's table."""
    if source.has_weights:
        return source.all_moves
    held = {name: shape for name, shape in model.shapes.items() if not (source.spec.tied and name == TIED)}
    return save_mappings(held, source.family.table)


def described(
    model: Decoder, move: KeyMapping, source: HFCheckpoint
) -> Iterator[tuple[str, tuple[Shape, torch.dtype]]]:
    """Shapes and dtypes of the Hub's tensors of a move: those of the source, or what config.json says."""
    shapes = move.hub_shapes(model.shapes) if move.ours else [source.tensors[name].shape for name in move.hub]
    for name, shape in zip(move.hub, shapes, strict=True):
        yield name, (shape, source.tensors[name].dtype if source.has_weights else source.usual_dtype)


def tensor_bytes(entry: tuple[Shape, torch.dtype]) -> int:
    """Bytes of a tensor."""
    return torch.Size(entry[0]).numel() * entry[1].itemsize


def plan_shards(entries: Entries, source: HFCheckpoint, shard: int | None = None) -> dict[str, list[str]]:
    """Files and the tensors in each: as in the source, or by size where it has no plain weights."""
    if source.has_weights and not any(isinstance(stored, PrequantizedTensor) for stored in source.tensors.values()):
        shards: dict[str, list[str]] = {}
        for name in entries:
            file = source.tensors[name].file
            usual = file.name if file.suffix != ".bin" else f"{file.stem.removeprefix('pytorch_')}.safetensors"
            shards.setdefault(usual, []).append(name)
        return shards
    parts: list[list[str]] = [[]]
    most = room = shard or SHARD
    for name, entry in entries.items():
        room -= tensor_bytes(entry)
        if room < 0 and parts[-1]:
            parts.append([])
            room = most - tensor_bytes(entry)
        parts[-1].append(name)
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def source_layout(source: HFCheckpoint, file: str) -> Path | None:
    """The file of the source whose order and metadata a written one keeps."""
    held = (stored for stored in source.stored.values()) if source.has_weights else ()
    return next((stored.file for stored in held if isinstance(stored, TensorSlice) and stored.file.name == file), None)


def hub_tensors(move: KeyMapping, ours: list[Tensor], kept: TensorReader | None) -> Iterable[tuple[str, Tensor]]:
    """The tensors of one move under their Hub names, as the model has them."""
    if not move.ours:
        assert kept is not None
        return ((name, kept[name]) for name in move.hub)
    return zip(move.hub, move.op.save(ours), strict=True)


def full_weight(model: Decoder, name: str, get: Get = full_tensor) -> Tensor:
    """A tensor of the model as numbers, whole, whatever the format of its layer."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Linear | GroupedLinear) and leaf == "weight":
        return module.dense(get)
    return get(module.get_parameter(leaf))


def write_index(folder: Path, shards: dict[str, list[str]], entries: Entries, source: HFCheckpoint) -> None:
    """Which tensor is in which file, and what else the index of the source says. One usual file needs none."""
    if list(shards) == [WEIGHTS]:
        return
    where = {name: file for file, names in shards.items() for name in names}
    told = {} if source.index is None else read_json(source.index)
    if source.index is not None and told["weight_map"] == where:
        shutil.copyfile(source.index, folder / INDEX)
        return
    metadata = (told.get("metadata") or {}) | {"total_size": sum(map(tensor_bytes, entries.values()))}
    (folder / INDEX).write_text(
        json.dumps({"metadata": metadata, "weight_map": where}, indent=2, sort_keys=True) + "\n"
    )


def write_config(folder: Path, source: HFCheckpoint) -> None:
    """What is otherwise than in the source: packed weights are written plain, and a head may be another one."""
    config = {key: value for key, value in source.config.items() if key != PACKED}
    if config != read_json(source.path / "config.json"):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
