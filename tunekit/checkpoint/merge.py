"""Merges a LoRA adapter into its base, one tensor at a time: sums in fp32, results in the dtypes of the base.

Other tensors are copied bit for bit. Peak memory is one tensor of the base, its LoRA factors, and a chunk in fp32.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.atomic import check_free_space
from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.checkpoint.lora_delta import WEIGHT, LoRADelta, transformers_key
from tunekit.checkpoint.model_dir import ModelDir, read_json
from tunekit.checkpoint.peft_adapter import owner_module
from tunekit.checkpoint.peft_reader import AdapterContents, TargetTensors, read_contents
from tunekit.checkpoint.safetensors_io import OpenFiles, TensorMeta, TensorReader, TensorSlice, TorchPickleTensor
from tunekit.checkpoint.save_model import (
    GENERATION_CONFIG,
    copy_companion_files,
    open_writers,
    plan_shards,
    tensor_bytes,
    unrelated_files,
    write_companions,
    write_config,
    write_index,
)
from tunekit.checkpoint.sentence_transformers import copy_modules
from tunekit.data.tokenizer_files import MODEL as TOKENIZER_JSON
from tunekit.data.tokenizer_files import TokenizerFiles, check_model_type
from tunekit.models.decoder import TIED
from tunekit.models.weight_map import Identity, KeyMapping, Stack, match_hub_name

CONFIG = "config.json"
CHUNK = 2**20  # elements that are in fp32 at a time
TOKENIZER_FILES = {TOKENIZER_JSON, "tokenizer.model"}  # an adapter with one of them has its own tokenizer


@torch.no_grad()
def merge_adapter(base: HFCheckpoint, adapter: AdapterDir, folder: Path, quiet: bool = False) -> bool:
    """Merge `adapter` into `base` and write the checkpoint into an existing directory.

    Returns whether a tied head was untied because merging made it differ from the embedding.
    """
    check_tokenizer(base, adapter)
    merged = MergedCheckpoint.from_adapter(base, adapter)
    entries = {name: (meta.shape, meta.dtype) for name, meta in merged.tensors.items()}
    check_free_space(folder, sum(map(tensor_bytes, entries.values())))
    shards = plan_shards(entries, merged)
    with merged.reader() as tensors, ExitStack() as stack:
        writers = open_writers(stack, folder, base, shards, entries)
        for name in tqdm(entries, "merging", unit="tensor", disable=quiet or None, leave=False):
            writers[name][name] = tensors[name]
    write_index(folder, shards, entries, base)
    write_companion_files(base, adapter, folder)
    if merged.was_untied:
        mark_untied(folder / CONFIG)
    return merged.was_untied


@dataclass(frozen=True)
class MergedCheckpoint(HFCheckpoint):
    """Virtual checkpoint with the contents that `tune merge` writes. A tensor is merged when it is read."""

    base: HFCheckpoint
    contents: AdapterContents

    @staticmethod
    def with_adapter(base: HFCheckpoint, adapter: NoAdapter | LoRAConfig) -> HFCheckpoint:
        """The base with the weights of an adapter; the base itself without any."""
        path = adapter.adapter_path
        return base if path is None else MergedCheckpoint.from_adapter(base, base.open_adapter(path))

    @staticmethod
    def from_adapter(base: HFCheckpoint, adapter: AdapterDir) -> "MergedCheckpoint":
        """The base with an adapter."""
        contents, tied = read_contents(adapter, base), base.spec.tie_word_embeddings
        if tied:
            with MergedTensors(base, contents, untied=True) as tensors:
                tied = tensors.keeps_tied_head()
        spec = replace(base.spec, tie_word_embeddings=tied)
        return MergedCheckpoint(
            *(base.directory, base.name, base.config, base.family, spec, base, contents),
            tokenizer_dir=base.tokenizer_dir,
            chat_tokenizer=base.chat_tokenizer,
            config_changes=base.config_changes,
            new_head=base.new_head,
        )

    @property
    def was_untied(self) -> bool:
        """Whether the base ties its head, which differs from the embedding after merging."""
        return self.base.spec.tie_word_embeddings and not self.spec.tie_word_embeddings

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        """Base tensors by the names of the merged ones, which have the same shapes and dtypes."""
        with self.reader() as tensors:
            return {name: self.base.tensors[source] for name, (_, source) in tensors.sources.items()}

    def reader(self) -> "MergedTensors":
        return MergedTensors(self.base, self.contents, self.was_untied)


class MergedTensors(TensorReader):
    """Reads the tensors of a base with an adapter merged.

    `untied`: embedding and head are tensors of their own, although the base ties them.
    """

    def __init__(self, base: HFCheckpoint, adapter: AdapterContents, untied: bool) -> None:
        super().__init__(base.tensors)
        self.base, self.adapter, self.untied = base, adapter, untied
        self.adapter_tensors = TensorReader(adapter.tensors)
        self.layers: dict[str, TargetTensors] = {}
        for target in adapter.targets:
            self.layers |= dict.fromkeys(target.load_deltas(adapter.meta_tensor, adapter.shapes), target)
        self.saved_mappings = {name: mapping for mapping in adapter.saved_mappings for name in mapping.ours}
        self.token_rows = dict(adapter.token_rows)
        if base.spec.tie_word_embeddings and EMBED in self.token_rows:
            self.token_rows[TIED] = self.token_rows[EMBED]
        self.cached_delta = lru_cache(maxsize=8)(self.read_delta)  # shared by the expert tensors of a layer
        # Mapping and base tensor of every merged tensor.
        self.sources = {name: (mapping, name) for mapping in base.all_key_mappings for name in mapping.hub}
        self.sources |= self.untied_sources()

    def __enter__(self) -> "MergedTensors":
        return self

    def __exit__(self, *error: object) -> None:
        self.adapter_tensors.__exit__(*error)
        super().__exit__(*error)

    def keeps_tied_head(self) -> bool:
        """Whether embedding and head are equal after merging."""
        if not {owner_module(EMBED), owner_module(TIED)} & self.layers.keys():
            return peft_adapter.keeps_tied_head(self.adapter)
        embed, head = self.end_mappings()
        return torch.equal(self.merge_tensor(embed, embed.hub[0]), self.merge_tensor(head, head.hub[0]))

    def end_mappings(self) -> tuple[KeyMapping, KeyMapping]:
        """Mappings of the embedding and of the head, which may read the same tensor."""
        embed = next(mapping for mapping in self.base.key_mappings if EMBED in mapping.ours)
        head = next((mapping for mapping in self.base.key_mappings if TIED in mapping.ours), embed)
        return embed, replace(head, ours=(TIED,))

    def untied_sources(self) -> dict[str, tuple[KeyMapping, str]]:
        """Embedding and head of a model that is untied. The base may have the shared tensor under either name."""
        if not self.untied:
            return {}
        table = self.base.family.table
        sources = {}
        for mapping, parameter in zip(self.end_mappings(), (EMBED, TIED), strict=True):
            match, name = match_hub_name(mapping.hub[0], table), mapping.hub[0]
            if match is None or match.ours != (parameter,):
                name = transformers_key(parameter, self.base.family).hub[0]
            sources[name] = mapping, mapping.hub[0]
        return sources

    def __getitem__(self, name: str) -> Tensor:
        mapping, source = self.sources[name]
        changed = {*self.saved_mappings, *self.token_rows, *(layer + WEIGHT for layer in self.layers)}
        is_changed = not changed.isdisjoint(mapping.ours)
        return self.merge_tensor(mapping, source) if is_changed else super().read_mapped(source)

    def read_mapped(self, name: str) -> Tensor:
        return self[name]

    def merge_tensor(self, mapping: KeyMapping, name: str) -> Tensor:
        """Merge into one checkpoint tensor. The base tensor is modified in place."""
        if isinstance(mapping.op, Stack):
            return self.merge_weight(mapping.ours[0], self.writable_tensor(name), mapping.hub.index(name))
        tensors = [self.writable_tensor(name) for name in mapping.hub]
        loaded = zip(mapping.ours, mapping.load(tensors, self.adapter.shapes), strict=True)
        weights = [self.merge_weight(name, tensor) for name, tensor in loaded]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        are_views = all(tensor.untyped_storage().data_ptr() in storages for tensor in weights)
        return (tensors if are_views else mapping.op.save(weights))[mapping.hub.index(name)]

    def writable_tensor(self, name: str) -> Tensor:
        """Base tensor in memory that can be modified."""
        tensor = super().__getitem__(name)
        return tensor.clone() if isinstance(self.tensors[name], TorchPickleTensor) else tensor

    def merge_weight(self, name: str, weight: Tensor, expert: int | None = None) -> Tensor:
        """Merge into one parameter, or into one expert of it, in place."""
        tied_name = EMBED if name == TIED and self.base.spec.tie_word_embeddings and not self.untied else name
        saved_name = name if name in self.saved_mappings else tied_name
        if mapping := self.saved_mappings.get(saved_name):
            return self.replace_weight(weight, mapping, mapping.ours.index(saved_name), expert)
        layer = name.removesuffix(WEIGHT)
        if layer in self.layers:
            delta = self.cached_delta(layer)
            add_delta(weight, delta if expert is None else delta.for_expert(expert))
        if rows := self.token_rows.get(name):
            weight[[*rows.ids]] = self.adapter_tensors[rows.name].to(weight.dtype)
        return weight

    def replace_weight(self, weight: Tensor, mapping: KeyMapping, index: int, expert: int | None) -> Tensor:
        """Replace a weight by the full weight in the adapter."""
        metas = [self.adapter_tensors.tensors[self.adapter.file_names[name]] for name in mapping.hub]
        if mapping.op == Identity() and isinstance(metas[0], TensorSlice) and len(metas[0].shape) == 2:
            return copy_rows(weight, metas[0], self.adapter_tensors.files)
        loaded = mapping.load([meta.read(self.adapter_tensors.files) for meta in metas], self.adapter.shapes)[index]
        return weight.copy_(loaded if expert is None else loaded[expert])

    def read_delta(self, layer: str) -> LoRADelta:
        return self.layers[layer].load_deltas(self.adapter_tensors.__getitem__, self.adapter.shapes)[layer]


def copy_rows(weight: Tensor, meta: TensorSlice, files: OpenFiles) -> Tensor:
    """Copy a matrix from a file into `weight` and its dtype, in chunks: a full fp32 embedding needs much memory."""
    columns = meta.shape[1]
    for row_slice in row_slices(weight):
        start = meta.start + row_slice.start * columns * meta.dtype.itemsize
        row_meta = replace(meta, shape=(len(weight[row_slice]), columns), start=start)
        weight[row_slice] = row_meta.read(files)
    return weight


def row_slices(weight: Tensor) -> Iterator[slice]:
    """Chunks of rows with at most `CHUNK` elements."""
    rows = max(1, CHUNK // weight.shape[1])
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def add_delta(weight: Tensor, delta: LoRADelta) -> None:
    """Add scale * B A in place, in chunks of rows, and apply the DoRA magnitude."""
    if weight.ndim == 3:
        for expert, matrix in enumerate(weight):
            add_delta(matrix, delta.for_expert(expert))
        return
    exact = torch.promote_types(weight.dtype, torch.float32)
    a = delta.a.to(exact)
    for rows in row_slices(weight):
        merged = torch.addmm(weight[rows].to(exact), delta.b[rows].to(exact), a, alpha=delta.scale)
        if delta.magnitude is not None:
            merged *= (delta.magnitude[rows].to(exact) / merged.norm(dim=1))[:, None]
        weight[rows] = merged


def check_tokenizer(base: HFCheckpoint, adapter: ModelDir) -> None:
    """Raise UserError if the adapter has another tokenizer, and transformers would read it differently in the base."""
    file, base_file = adapter.path / TOKENIZER_JSON, base.tokenizer_path / TOKENIZER_JSON
    if not adapter.has_tokenizer or (base_file.is_file() and file.read_bytes() == base_file.read_bytes()):
        return
    hints = TokenizerFiles.read(adapter.path, adapter.config).hints
    check_model_type(hints, adapter.config, base.config)


def write_companion_files(base: HFCheckpoint, adapter: AdapterDir, folder: Path) -> None:
    """Write config.json and all files other than weights. The tokenizer is the adapter's, if it has one."""
    has_tokenizer = any((adapter.path / name).is_file() for name in TOKENIZER_FILES)
    base = replace(base, tokenizer_dir=adapter) if has_tokenizer else base
    copy_companion_files(base, folder, skip=unrelated_files(base))
    if (adapter.path / GENERATION_CONFIG).is_file():  # with the stop tokens of its chat template
        shutil.copyfile(adapter.path / GENERATION_CONFIG, folder / GENERATION_CONFIG)
    for directory in (base.path, adapter.path) if base.is_base_model else (adapter.path,):
        copy_modules(directory, folder)
    write_companions(folder, base)
    write_config(folder, base)


def mark_untied(file: Path) -> None:
    """Set tie_word_embeddings to false in config.json, also for its text model."""
    config = read_json(file)
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            section["tie_word_embeddings"] = False
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
