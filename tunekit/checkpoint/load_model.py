"""Loads checkpoint weights into a model in place, one tensor at a time. Peak memory is the model plus one tensor."""

import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tunekit.adapters.token_rows import token_row_layers
from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.checkpoint.safetensors_io import TensorReader
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import SHARDED_STORAGE, ShardSlice, copy_to_shard, shard_slice, to_local
from tunekit.errors import UserError
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.weight_init import upload_tensor
from tunekit.models.weight_map import KeyMapping, Shape, Stack, to_hub_name

Offset = tuple[int, ...]
ReadTensor = Callable[[str], Tensor]  # by checkpoint name
StoreTensor = Callable[[str, Tensor], None]  # by parameter name
InspectTensor = Callable[[str, Offset, Tensor], None]


def load_weights(
    source: HFCheckpoint, model: Decoder, quiet: bool = False, dist: DistributedContext | None = None
) -> None:
    """Load all weights of a checkpoint into a model. Adapter parameters are unchanged, except rows of tokens.

    Files are memory-mapped, so each rank reads only its local shards. Warns about NaN and Inf.
    """
    dist = dist or DistributedContext(device="cpu")
    check_tensors(source, model.shapes)
    non_finite: dict[tuple[str, Offset], int] = {}
    with source.reader() as tensors:

        def inspect(name: str, offset: Offset, values: Tensor) -> None:
            if count := count_non_finite(values):
                non_finite[name, offset] = count

        mappings, is_quiet = key_mappings(source, model), quiet or not dist.is_main_process
        for mapping in tqdm(mappings, "loading", unit="tensor", disable=is_quiet or None, leave=False):
            if TIED in mapping.ours and model.spec.tie_word_embeddings:
                check_tied_head(source, mapping, tensors)
            else:
                apply_mapping(model, mapping, tensors.read_mapped, partial(load_tensor_and_rows, model), inspect)
    for layer in token_row_layers(model).values():
        layer.lora_token_ids.copy_(torch.tensor(layer.token_ids))
    non_finite = {key: count for counts in dist.all_gather_objects(non_finite) for key, count in counts.items()}
    if non_finite and not is_quiet:
        warn_non_finite(non_finite, source)


def key_mappings(source: HFCheckpoint, model: Decoder) -> list[KeyMapping]:
    """Mappings from checkpoint to model. If only the checkpoint ties the head, it is initialized from the embedding."""
    mappings = source.key_mappings
    if model.spec.tie_word_embeddings or any(TIED in mapping.ours for mapping in mappings):
        return mappings
    embeddings = [mapping for mapping in mappings if mapping.ours == (EMBED,)]
    return [*mappings, *(KeyMapping((TIED,), mapping.hub, mapping.op) for mapping in embeddings)]


def skip_inspection(name: str, offset: Offset, values: Tensor) -> None:
    """Default of `apply_mapping`: do not inspect tensors."""


def apply_mapping(
    model: Decoder, mapping: KeyMapping, read: ReadTensor, store: StoreTensor, inspect: InspectTensor = skip_inspection
) -> None:
    """Read the checkpoint tensors of a mapping, convert them, and pass them to `store`.

    `inspect` is called with the local shards. Of stacked experts, only the local ones are read, one at a time. Weights
    that a layer quantizes are read in full.
    """
    if isinstance(mapping.op, Stack) and (stack := find_parameter(model, mapping.ours[0])) is not None:
        location = shard_slice(stack)
        for i, expert in enumerate(to_local(stack.detach()), start=location.offset[0]):
            values = ShardSlice(location.shape[1:], location.offset[1:]).slice_local(read(mapping.hub[i]), expert.shape)
            inspect(mapping.hub[i], location.offset[1:], values)
            upload_tensor(expert, values)
        return
    loaded = mapping.load([read(name) for name in mapping.hub], model.shapes)
    for name, tensor in zip(mapping.ours, loaded, strict=True):
        target = find_parameter(model, name)
        offset, values = (), tensor
        if target is not None:
            offset, values = shard_slice(target).offset, shard_slice(target).slice_local(tensor, to_local(target).shape)
        inspect(mapping.hub[0], (*offset, mapping.ours.index(name)), values)
        store(name, tensor)


def find_parameter(model: Decoder, name: str) -> nn.Parameter | None:
    """Parameter of a model; None if its layer stores the weight quantized."""
    owner, _, leaf = name.rpartition(".")
    return dict(model.get_submodule(owner).named_parameters(recurse=False)).get(leaf)


def load_tensor_and_rows(model: Decoder, name: str, tensor: Tensor) -> None:
    """Load one parameter, and its rows that are trained on their own."""
    layer = token_row_layers(model).get(name.removesuffix(".weight"))
    if layer is not None:
        with torch.no_grad():
            copy_to_shard(layer.lora_token_rows, tensor[[*layer.token_ids]].float())
    load_tensor(model, name, tensor)


def load_tensor(model: Decoder, name: str, tensor: Tensor) -> None:
    """Load one parameter. Linear layers load their own weight, which they may quantize."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Linear | GroupedLinear) and leaf == "weight":
        module.load_weight(tensor)
    else:
        SHARDED_STORAGE.adopt(module.get_parameter(leaf), tensor)


def count_non_finite(tensor: Tensor) -> int:
    """Count NaN and Inf. The sum is checked first: it takes 0.05 s/GB, counting takes 3 s/GB."""
    return 0 if tensor.sum().isfinite() else int((~tensor.isfinite()).sum())


def warn_non_finite(counts: Mapping[tuple[str, Offset], int], source: HFCheckpoint) -> None:
    """Warn about non-finite weights in a checkpoint."""
    name, *other_names = sorted({name for name, _ in counts}, key=[*source.tensors].index)
    location = f"{name}{f' and {len(other_names)} more tensors' if other_names else ''}"
    message = f"warning: {source.tensors[name].file}: {sum(counts.values())} weights are NaN or Inf, in {location}"
    tqdm.write(message, file=sys.stderr)


def check_tensors(source: HFCheckpoint, shapes: Mapping[str, Shape]) -> None:
    """Raise UserError unless the checkpoint has exactly the tensors of the model, in their shapes."""
    seen = set()
    for mapping in source.key_mappings:
        first = source.tensors[mapping.hub[0]]
        if unexpected := [name for name in mapping.ours if name not in shapes]:
            detail = "" if len(unexpected) == len(mapping.ours) else f" (its part {unexpected[0]})"
            raise UserError(f"{first.file}: {mapping.hub[0]}{detail} is not in the model described by config.json")
        check_shapes(source, mapping, shapes)
        seen.update(mapping.ours)
    optional = {TIED} if source.spec.tie_word_embeddings else set()
    if missing := [name for name in shapes if name not in seen | optional]:
        hub = to_hub_name(missing[0], source.family.table)
        suffix = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{source.path}: incomplete checkpoint, {hub}{suffix} is missing")


def check_shapes(source: HFCheckpoint, mapping: KeyMapping, shapes: Mapping[str, Shape]) -> None:
    """Raise UserError unless the tensors of a mapping match the parameters in number and shape."""
    expected = mapping.hub_shapes(shapes)
    for name, shape in zip(mapping.hub, expected, strict=False):
        meta = source.tensors[name]
        if meta.shape != shape:
            mismatch = f"has shape {list(meta.shape)}, expected {list(shape)} from config.json"
            raise UserError(f"{meta.file}: {name} {mismatch}")
    if len(mapping.hub) != len(expected):
        last = mapping.hub[-1]
        problem = f"{last} is the last of {len(mapping.hub)} tensors, expected {len(expected)}"
        raise UserError(f"{source.tensors[last].file}: {problem}")


def check_tied_head(source: HFCheckpoint, mapping: KeyMapping, tensors: TensorReader) -> None:
    """Raise UserError if a checkpoint with tied embeddings contains a head that differs from the embedding."""
    embedding = next(other.hub[0] for other in source.key_mappings if other.ours[0] == EMBED)
    if not torch.equal(tensors.read_mapped(mapping.hub[0]), tensors.read_mapped(embedding)):
        problem = f"{mapping.hub[0]} differs from {embedding}, but config.json ties them"
        raise UserError(f"{source.path}: {problem}. Set tie_word_embeddings to false.")
