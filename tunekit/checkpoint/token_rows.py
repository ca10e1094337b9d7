"""Reads and writes rows of embeddings that are trained on their own: `trainable_token_indices` of PEFT."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tunekit.adapters.token_rows import token_row_layers
from tunekit.checkpoint.adapter_dir import PREFIX, AdapterDir
from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.checkpoint.load_model import key_mappings
from tunekit.checkpoint.lora_delta import WEIGHT, transformers_key
from tunekit.checkpoint.peft_reader import TOKEN_PARAMETERS, TOKEN_ROWS, StoredRows, is_saved_name, saved_name
from tunekit.checkpoint.safetensors_io import TensorReader
from tunekit.distributed.sharding import copy_to_shard, full_tensor
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Gather
from tunekit.models.weight_map import match_hub_name


def with_adapter_tokens(adapter: AdapterDir, source: HFCheckpoint) -> HFCheckpoint:
    """Copy of a base for an adapter: with embedding rows for all of its tokens, and the ids that the adapter trains."""
    ids, size = set(), 0
    for name, meta in adapter.header.tensors.items():
        if name.endswith(TOKEN_ROWS):
            ids |= {*adapter.peft.token_ids(name.removeprefix(PREFIX).removesuffix(TOKEN_ROWS))}
        elif is_saved_name(name) and (match := match_hub_name(saved_name(name), source.family.table)):
            parameter = match.ours[0] if match.ours else ""
            extra = source.spec.extra_embeddings if parameter == EMBED else 0
            size = max(size, meta.shape[0] - extra if parameter in TOKEN_PARAMETERS else 0)
    resized = source.with_vocab_size(max(size, max(ids, default=0) + 1))
    return replace(resized, trained_ids=tuple(sorted(ids)), adapter=adapter)


@torch.no_grad()
def load_token_rows(model: Decoder, source: HFCheckpoint) -> None:
    """Fill the rows of a model from its checkpoint."""
    for name, layer in token_row_layers(model).items():
        ids = torch.tensor(layer.token_ids)
        layer.lora_token_ids.copy_(ids)
        if name != "head" or not model.spec.tie_word_embeddings:
            copy_to_shard(layer.lora_token_rows, read_rows(source, model, name + WEIGHT, ids))


@torch.no_grad()
def load_stored_rows(model: Decoder, stored: Mapping[str, StoredRows], tensors: TensorReader) -> None:
    """Fill the rows of a model that an adapter has. A tied head shares those of the embedding."""
    for name, layer in token_row_layers(model).items():
        is_tied = name == "head" and model.spec.tie_word_embeddings
        if not is_tied and (item := stored.get(name + WEIGHT)):
            rows = full_tensor(layer.lora_token_rows).clone()
            index = torch.searchsorted(torch.tensor(layer.token_ids), torch.tensor(item.ids))
            rows[index.to(rows.device)] = tensors[item.name].to(rows)
            copy_to_shard(layer.lora_token_rows, rows)


def read_rows(source: HFCheckpoint, model: Decoder, name: str, ids: Tensor) -> Tensor:
    """Rows of a parameter in a checkpoint, in fp32."""
    mapping = next(mapping for mapping in key_mappings(source, model) if name in mapping.ours)
    with source.reader() as tensors:
        loaded = mapping.load([tensors.read_mapped(key) for key in mapping.hub], model.shapes)
        return loaded[mapping.ours.index(name)][ids].float()


def check_same_tokens(adapter: AdapterDir, model: Decoder, ids: tuple[int, ...]) -> None:
    """Raise UserError unless a model has rows for exactly the tokens of an adapter."""
    expected = next((layer.token_ids for layer in token_row_layers(model).values()), ())
    if expected != ids:
        problem = f"{[*expected]}, but the adapter in {adapter.path} has {[*ids]}"
        raise UserError(f"adapter.trainable_token_indices: {problem}. Set the ids of the adapter.")


def stored_rows(model: Decoder, source: HFCheckpoint, get: Gather) -> dict[str, Tensor]:
    """Tensors of an adapter file by name. PEFT ties the rows of a tied head itself."""
    layers = token_row_layers(model)
    names = [name for name in layers if name == "embed" or not model.spec.tie_word_embeddings]
    return {module_name(name, source) + TOKEN_ROWS: get(layers[name].lora_token_rows) for name in names}


def token_indices(model: Decoder, source: HFCheckpoint) -> dict[str, Any]:
    """Entry of adapter_config.json: ids, by module if the head has rows of its own."""
    layers = token_row_layers(model)
    if model.spec.tie_word_embeddings or layers.keys() == {"embed"}:
        ids: Any = next((list(layer.token_ids) for layer in layers.values()), None)
    else:
        names = {name: module_name(name, source).rpartition(".")[2] for name in layers}
        ids = {names[name]: list(layer.token_ids) for name, layer in layers.items()} or None
    return {"trainable_token_indices": ids}


def module_name(name: str, source: HFCheckpoint) -> str:
    """Name of the embedding or the head in transformers."""
    return transformers_key(name + WEIGHT, source.family).hub[0].removesuffix(WEIGHT)
