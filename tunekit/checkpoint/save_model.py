"""Saves a model in Hugging Face format, with the files, tensor names and dtypes of the checkpoint it was loaded from.

Tensors are written one mapping at a time, which bounds the additional memory.
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

from tunekit.checkpoint.atomic import check_free_space, wrap_write_errors
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.dequantize import QUANTIZATION_KEY, PrequantizedTensor
from tunekit.checkpoint.hf_checkpoint import INDEX, PICKLE_INDEX, WEIGHTS, HFCheckpoint
from tunekit.checkpoint.model_dir import read_json
from tunekit.checkpoint.safetensors_io import Entries, SafetensorsWriter, TensorReader
from tunekit.checkpoint.sentence_transformers import MODULE_FILES, read_modules
from tunekit.data.new_tokens import write_new_tokens
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.tokenizer_files import keep_class
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import full_tensor
from tunekit.errors import DeferredError
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import Gather, GroupedLinear, Linear
from tunekit.models.weight_map import KeyMapping, Shape, save_mappings

SHARD_BYTES = 5 * 10**9  # bytes per file if the source has no weight files
GENERATION_CONFIG = "generation_config.json"  # generation defaults and EOS token ids
# Files of a checkpoint other than its weights.
COMPANIONS = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
TEMPLATES = ("chat_template*", "additional_chat_templates/*.jinja")
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", *TEMPLATES, "vocab.*", "merges.txt")
TOKENIZER += ("tekken.json", "spiece.model")


def save_model(
    folder: Path, model: Decoder, source: HFCheckpoint, quiet: bool = False, dist: DistributedContext | None = None
) -> None:
    """Save a full model into an existing directory. Quantized weights are saved dequantized.

    Must be called on all ranks. Every rank gathers all parameters; ranks take turns writing the tensors of a mapping.
    """
    dist = dist or DistributedContext(device="cpu")
    reshard(model)
    mappings = output_mappings(model, source)
    entries = model_entries(model, source)
    shards = plan_shards(entries, source)
    dist.run_on_main(partial(create_model_files, folder, source, shards, entries))
    deferred = DeferredError()
    with ExitStack() as stack:
        writers = open_writers(stack, folder, source, shards, entries, exists=True)
        source_tensors = stack.enter_context(source.reader()) if source.has_weights else None
        is_quiet = quiet or not dist.is_main_process
        for i, mapping in enumerate(tqdm(mappings, "saving", unit="tensor", disable=is_quiet or None, leave=False)):
            weights = [full_weight(model, name).detach() for name in mapping.ours]
            if i % dist.world_size == dist.rank:
                deferred(partial(write_mapping, folder, writers, entries, mapping, weights, source_tensors))
    dist.run_on_all(deferred.raise_error)


def create_model_files(folder: Path, source: HFCheckpoint, shards: dict[str, list[str]], entries: Entries) -> None:
    """Create all files of the checkpoint except the tensor data. Raises UserError if the disk is too small."""
    check_free_space(folder, sum(map(tensor_bytes, entries.values())))
    with wrap_write_errors(folder), ExitStack() as stack:
        copy_companion_files(source, folder, skip=unrelated_files(source))
        write_chat_format(folder, source)
        write_companions(folder, source)
        open_writers(stack, folder, source, shards, entries)
        write_index(folder, shards, entries, source)
        write_config(folder, source)


def open_writers(
    stack: ExitStack,
    folder: Path,
    source: HFCheckpoint,
    shards: dict[str, list[str]],
    entries: Entries,
    exists: bool = False,
) -> dict[str, SafetensorsWriter]:
    """Open the weight files; returns the writer of each tensor."""
    writers: dict[str, SafetensorsWriter] = {}
    for file, names in shards.items():
        file_entries = {name: entries[name] for name in names}
        like = source.directory.headers.get(file) if source.has_weights else None
        writer = SafetensorsWriter(folder / file, file_entries, like, exists=exists)
        stack.enter_context(writer)
        writers |= dict.fromkeys(names, writer)
    return writers


def write_mapping(
    folder: Path,
    writers: Mapping[str, SafetensorsWriter],
    entries: Entries,
    mapping: KeyMapping,
    weights: list[Tensor],
    source_tensors: TensorReader | None,
) -> None:
    """Write the tensors of a mapping."""
    with wrap_write_errors(folder):
        for name, tensor in hub_tensors(mapping, weights, source_tensors):
            writers[name][name] = tensor.to(entries[name][1])


def copy_companion_files(source: HFCheckpoint, target: Path, skip: Iterable[str] = ()) -> None:
    """Copy config, tokenizer, chat template and license files."""
    skipped = {INDEX, PICKLE_INDEX, *skip}
    if source.tokenizer_dir is not None:
        copy_matching(source.tokenizer_path, target, (*TOKENIZER, GENERATION_CONFIG), skipped)
        skipped |= {file.name for pattern in TOKENIZER for file in source.path.glob(pattern)}
    copy_matching(source.path, target, COMPANIONS, skipped)
    keep_class(target, (source.tokenizer_dir or source.directory).config)


def unrelated_files(source: HFCheckpoint) -> tuple[str, ...]:
    """Files of the source that do not apply to a checkpoint that cannot generate text."""
    has_score = source.spec.score is not None
    modules = MODULE_FILES if has_score and len(read_modules(source.path)) > 1 else ()  # the score head replaces them
    return (GENERATION_CONFIG, *modules) if has_score or source.is_base_model else ()


def copy_matching(source: Path, target: Path, patterns: Iterable[str], skipped: set[str]) -> None:
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.name not in skipped:
                path = target / file.relative_to(source)
                path.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, path)


def write_chat_format(folder: Path, source: HFCheckpoint) -> None:
    """Add new tokens to a saved checkpoint, and replace its chat templates and stop tokens, if the run has others."""
    tokenizer = source.chat_tokenizer
    write_new_tokens(folder, source.new_tokens)
    if tokenizer is None:
        return
    for file in (file for pattern in TEMPLATES for file in folder.glob(pattern)):
        file.unlink()
    for name, text in tokenizer.template_texts.items():
        path = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    if config.pop("chat_template", None) is not None:
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if source.spec.score is None and not source.is_base_model:
        write_stop_tokens(folder / GENERATION_CONFIG, source, tokenizer.stops)


def write_companions(folder: Path, source: HFCheckpoint) -> None:
    """Write the further files of a checkpoint. Texts without an answer are scored in batches: set the padding token."""
    for name, text in source.companions.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    if config and not config.get("pad_token") and (source.spec.score is not None or source.is_base_model):
        model = Tokenizer.open(folder)
        config["pad_token"] = model.model.id_to_token(model.pad)
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_stop_tokens(file: Path, source: HFCheckpoint, stops: frozenset[int]) -> None:
    """Write a generation config with stop tokens, if they differ from those of the tokenizer's directory."""
    if stops == (source.tokenizer_dir or source.directory).tokenizer.stops:
        return
    is_copied = source.tokenizer_dir is None and file.is_file()
    original = file if is_copied else source.tokenizer_path / GENERATION_CONFIG
    config = read_json(original) if original.is_file() else {}
    config["eos_token_id"] = sorted(stops)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def output_mappings(model: Decoder, source: HFCheckpoint) -> list[KeyMapping]:
    """Mappings to save a model: those of its checkpoint, or of the family if the source has no weights."""
    if source.has_weights:
        return source.all_key_mappings
    tied = {TIED} if source.spec.tie_word_embeddings else set()
    shapes = {name: shape for name, shape in model.shapes.items() if name not in tied}
    return save_mappings(shapes, source.family.table)


def model_entries(model: Decoder, source: HFCheckpoint) -> Entries:
    """Shapes and dtypes of all checkpoint tensors."""
    mappings = output_mappings(model, source)
    return {name: entry for mapping in mappings for name, entry in tensor_entries(model, mapping, source)}


def tensor_entries(
    model: Decoder, mapping: KeyMapping, source: HFCheckpoint
) -> Iterator[tuple[str, tuple[Shape, torch.dtype]]]:
    """Shapes and dtypes of the checkpoint tensors of a mapping."""
    shapes = mapping.hub_shapes(model.shapes) if mapping.ours else [source.tensors[name].shape for name in mapping.hub]
    for name, shape in zip(mapping.hub, shapes, strict=True):
        yield name, (shape, source.tensors[name].dtype if source.has_weights else source.default_dtype)


def tensor_bytes(entry: tuple[Shape, torch.dtype]) -> int:
    """Size of a tensor in bytes."""
    return torch.Size(entry[0]).numel() * entry[1].itemsize


def plan_shards(entries: Entries, source: HFCheckpoint, shard: int | None = None) -> dict[str, list[str]]:
    """Tensor names by file: as in the source, or split by size if the source has no unquantized weights."""
    if source.has_weights and not any(isinstance(meta, PrequantizedTensor) for meta in source.tensors.values()):
        shards: dict[str, list[str]] = {}
        for name in entries:
            file = source.tensors[name].file
            default_name = file.name if file.suffix != ".bin" else f"{file.stem.removeprefix('pytorch_')}.safetensors"
            shards.setdefault(default_name, []).append(name)
        return shards
    groups: list[list[str]] = [[]]
    shard_bytes = free_bytes = shard or SHARD_BYTES
    for name, entry in entries.items():
        free_bytes -= tensor_bytes(entry)
        if free_bytes < 0 and groups[-1]:
            groups.append([])
            free_bytes = shard_bytes - tensor_bytes(entry)
        groups[-1].append(name)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def hub_tensors(
    mapping: KeyMapping, weights: list[Tensor], source_tensors: TensorReader | None
) -> Iterable[tuple[str, Tensor]]:
    """Tensors of a mapping by checkpoint name. Tensors that the model does not load are copied from the source."""
    if not mapping.ours:
        assert source_tensors is not None
        return ((name, source_tensors[name]) for name in mapping.hub)
    return zip(mapping.hub, mapping.op.save(weights), strict=True)


def full_weight(model: Decoder, name: str, get: Gather = full_tensor) -> Tensor:
    """Full, dequantized parameter of a model. `get` gathers a sharded tensor."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Linear | GroupedLinear) and leaf == "weight":
        return module.dequantize(get)
    return get(module.get_parameter(leaf))


def write_index(folder: Path, shards: dict[str, list[str]], entries: Entries, source: HFCheckpoint) -> None:
    """Write the index, with the metadata of the source's index. A single file with the default name needs none."""
    if list(shards) == [WEIGHTS]:
        return
    weight_map = {name: file for file, names in shards.items() for name in names}
    source_index, file = source.directory.index_content, source.directory.index
    if file is not None and source_index["weight_map"] == weight_map and not source.new_rows:
        shutil.copyfile(file, folder / INDEX)
        return
    metadata = (source_index.get("metadata") or {}) | {"total_size": sum(map(tensor_bytes, entries.values()))}
    index = {"metadata": metadata, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_config(folder: Path, source: HFCheckpoint) -> None:
    """Write config.json if it differs from the source: without a quantization config, or with a new score head."""
    config = {key: value for key, value in source.config.items() if key != QUANTIZATION_KEY}
    if config != source.directory.config:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
