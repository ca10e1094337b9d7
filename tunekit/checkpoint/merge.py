"""An adapter's updates put into the weights of its base: tensor after tensor, in the base's dtypes, with sums in fp32.

What no update touches is copied bit for bit. In memory at once: a tensor of the base, its updates, and a part in fp32.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.atomic import check_free_space
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.lora_weights import WEIGHT, LoRADelta, transformers_key
from tunekit.checkpoint.peft_adapter import owner_module
from tunekit.checkpoint.peft_reader import AdapterContents, TargetTensors, read_contents
from tunekit.checkpoint.safetensors_io import OpenFiles, SafetensorsWriter, TensorReader, TensorSlice, TorchPickleTensor
from tunekit.checkpoint.save_model import (
    copy_companion_files,
    plan_shards,
    source_layout,
    tensor_bytes,
    unrelated_files,
    write_config,
    write_index,
)
from tunekit.models.decoder import TIED
from tunekit.models.weight_map import Identity, KeyMapping, Shape, Stack, match_hub_name

CONFIG = "config.json"
EMBED = "embed" + WEIGHT
CHUNK = 2**20  # numbers that are in fp32 at once
OWN = {"tokenizer.json", "tokenizer.model"}  # one of them is a tokenizer


@torch.no_grad()
def merge_adapter(base: HFCheckpoint, adapter: Path, folder: Path, quiet: bool = False) -> bool:
    """Write `base` with what `adapter` has learnt into a folder that is there.

    Returns whether a head that was the embedding became a tensor of its own, for it no longer is the same.
    """
    held = read_contents(adapter, base)
    with base.reader() as tensors, TensorReader(held.tensors) as updates:
        merging = MergedTensors(base, held, tensors, updates)
        entries = merging.entries()
        check_free_space(folder, sum(map(tensor_bytes, entries.values())))
        shards = plan_shards({name: entry for name, entry in entries.items() if name in base.tensors}, base)
        for name in entries.keys() - base.tensors.keys():  # a new one goes where the tensor is that it began as
            next(names for names in shards.values() if merging.sources[name][1] in names).append(name)
        with tqdm(total=len(entries), desc="merging", unit="tensor", disable=quiet or None, leave=False) as bar:
            for file, names in shards.items():
                with SafetensorsWriter(
                    folder / file, {name: entries[name] for name in names}, source_layout(base, file)
                ) as out:
                    for name in names:
                        out[name] = merging.tensor(name)
                        bar.update()
        write_index(folder, shards, entries, base)
        write_companion_files(base, adapter, folder)
        if merging.untied:
            mark_untied(folder / CONFIG)
        return merging.untied


class MergedTensors:
    """Tensors of the merged checkpoint, one at a time, by the Hub's names."""

    def __init__(self, base: HFCheckpoint, held: AdapterContents, tensors: TensorReader, updates: TensorReader) -> None:
        self.base, self.held, self.tensors, self.updates = base, held, tensors, updates
        self.layers: dict[str, TargetTensors] = {
            name: one for one in held.held for name in one.load(held.outline, held.shapes)
        }
        self.kept = {name: move for move in held.kept for name in move.ours}
        self.update = lru_cache(maxsize=8)(self.load)  # experts of a layer are many tensors and one update
        self.untied = base.spec.tied  # as long as it is not known, each end is merged for itself
        self.untied = self.untied and not self.stays_tied()
        # The moves of all tensors to come, and the tensors of the base that they begin as.
        self.sources = {name: (move, name) for move in base.all_moves for name in move.hub} | self.pair()

    def stays_tied(self) -> bool:
        """Whether embedding and head are still one."""
        if not {owner_module(EMBED), owner_module(TIED)} & self.layers.keys():
            return peft_adapter.keeps_tied_head(self.held)
        embed, head = self.ends()
        return torch.equal(self.merged(embed, embed.hub[0]), self.merged(head, head.hub[0]))

    def ends(self) -> tuple[KeyMapping, KeyMapping]:
        """The moves of the embedding and of the head, where one tensor is both or there are two that are equal."""
        embed = next(move for move in self.base.moves if EMBED in move.ours)
        head = next((move for move in self.base.moves if TIED in move.ours), embed)
        return embed, replace(head, ours=(TIED,))

    def pair(self) -> dict[str, tuple[KeyMapping, str]]:
        """Both ends of a model that no longer shares them. A file may hold what they share under either name."""
        if not self.untied:
            return {}
        table = self.base.family.table
        found = {}
        for move, ours in zip(self.ends(), (EMBED, TIED), strict=True):
            match = match_hub_name(move.hub[0], table)
            name = (
                move.hub[0]
                if match is not None and match.ours == (ours,)
                else transformers_key(ours, self.base.family).hub[0]
            )
            found[name] = move, move.hub[0]
        return found

    def entries(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of all tensors."""
        stored = {name: self.base.tensors[source] for name, (_, source) in self.sources.items()}
        return {name: (one.shape, one.dtype) for name, one in stored.items()}

    def tensor(self, name: str) -> Tensor:
        move, source = self.sources[name]
        touched = any(ours in self.kept or ours.removesuffix(WEIGHT) in self.layers for ours in move.ours)
        return self.merged(move, source) if touched else self.tensors.lend(source)

    def merged(self, move: KeyMapping, name: str) -> Tensor:
        """One of the Hub's tensors with what was learnt. The numbers of the base are replaced where they are."""
        if isinstance(move.op, Stack):
            return self.learnt(move.ours[0], self.own(name), move.hub.index(name))
        hub = [self.own(name) for name in move.hub]
        ours = [self.learnt(n, t) for n, t in zip(move.ours, move.load(hub, self.held.shapes), strict=True)]
        places = {tensor.untyped_storage().data_ptr() for tensor in hub}
        views = all(tensor.untyped_storage().data_ptr() in places for tensor in ours)
        return (hub if views else move.op.save(ours))[move.hub.index(name)]

    def own(self, name: str) -> Tensor:
        """A tensor of the base in memory that is nobody else's."""
        return (
            self.tensors[name].clone() if isinstance(self.base.tensors[name], TorchPickleTensor) else self.tensors[name]
        )

    def learnt(self, name: str, weight: Tensor, expert: int | None = None) -> Tensor:
        """One of our tensors, or one expert of it, with what was learnt."""
        shared = EMBED if name == TIED and self.base.spec.tied and not self.untied else name
        if move := self.kept.get(name, self.kept.get(shared)):
            return self.replaced(weight, move, move.ours.index(name if name in self.kept else shared), expert)
        layer = name.removesuffix(WEIGHT)
        if layer in self.layers:
            update = self.update(layer)
            add(weight, update if expert is None else update.of(expert))
        return weight

    def replaced(self, weight: Tensor, move: KeyMapping, part: int, expert: int | None) -> Tensor:
        """A tensor that the adapter holds whole, in place of the base's."""
        stored = [self.updates.tensors[self.held.names[name]] for name in move.hub]
        if move.op == Identity() and isinstance(stored[0], TensorSlice) and len(stored[0].shape) == 2:
            return copied(weight, stored[0], self.updates.files)
        loaded = move.load([one.read(self.updates.files) for one in stored], self.held.shapes)[part]
        return weight.copy_(loaded if expert is None else loaded[expert])

    def load(self, layer: str) -> LoRADelta:
        return self.layers[layer].load(self.updates.__getitem__, self.held.shapes)[layer]


def copied(weight: Tensor, stored: TensorSlice, files: OpenFiles) -> Tensor:
    """A matrix of a file in the place and dtype of another, some rows at a time: an embedding in fp32 is large."""
    columns = stored.shape[1]
    for part in some_rows(weight):
        start = stored.start + part.start * columns * stored.dtype.itemsize
        rows = replace(stored, shape=(len(weight[part]), columns), start=start)
        weight[part] = rows.read(files)
    return weight


def some_rows(weight: Tensor) -> Iterator[slice]:
    """Parts of a matrix of which each is small in fp32."""
    rows = max(1, CHUNK // weight.shape[1])
    return (slice(at, at + rows) for at in range(0, len(weight), rows))


def add(weight: Tensor, update: LoRADelta) -> None:
    """W + s B A in place, some rows at a time; DoRA then gives each row its length."""
    if weight.ndim == 3:
        for expert, one in enumerate(weight):
            add(one, update.of(expert))
        return
    exact = torch.promote_types(weight.dtype, torch.float32)
    a = update.a.to(exact)
    for some in some_rows(weight):
        made = torch.addmm(weight[some].to(exact), update.b[some].to(exact), a, alpha=update.scale)
        if update.magnitude is not None:
            made *= (update.magnitude[some].to(exact) / made.norm(dim=1))[:, None]
        weight[some] = made


def write_companion_files(base: HFCheckpoint, adapter: Path, folder: Path) -> None:
    """config.json and all that stands beside weights. An adapter's own tokenizer goes with it: it was trained on it."""
    own = any((adapter / name).is_file() for name in OWN)
    copy_companion_files(base.path, folder, skip=unrelated_files(base), tokenizer=adapter if own else base.words)
    write_config(folder, base)


def mark_untied(file: Path) -> None:
    """Say in config.json, and for the text model in it, that the head is no longer the embedding."""
    config = read_json(file)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
