"""Loads the weights of a PEFT adapter into a model that it fits."""

import json
import math
from dataclasses import replace

from torch import nn

from tunekit.adapters.config import TIED_MODULES, LoRAConfig, lora_factors
from tunekit.checkpoint import token_rows
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.lora_delta import WEIGHT, LoRADelta, transformers_key
from tunekit.checkpoint.peft_adapter import adapter_config, effective_alpha, read_adapter_config, saved_parameters
from tunekit.checkpoint.peft_reader import AdapterContents, read_contents
from tunekit.checkpoint.safetensors_io import TensorReader
from tunekit.config.choices import kind_name
from tunekit.distributed.sharding import copy_to_shard
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.families.config_overrides import model_section
from tunekit.models.linear import Embedding, GroupedLinear, Linear


def load_adapter(adapter: AdapterDir, model: Decoder, source: HFCheckpoint) -> None:
    """Load a PEFT adapter into a model that it fits, see `check_adapter_fits`."""
    contents = read_contents(adapter, source)
    with TensorReader(contents.tensors) as tensors:
        load_lora_weights(model, contents, tensors)
        token_rows.load_stored_rows(model, contents.token_rows, tensors)
        for mapping in contents.saved_mappings:
            loaded = mapping.load([tensors[contents.file_names[name]] for name in mapping.hub], contents.shapes)
            for name, tensor in zip(mapping.ours, loaded, strict=True):
                copy_to_shard(model.get_parameter(name), tensor)


def load_lora_weights(model: Decoder, contents: AdapterContents, tensors: TensorReader) -> None:
    for target in contents.targets:
        for name, delta in target.load_deltas(tensors.__getitem__, contents.shapes).items():
            fill_layer(model.get_submodule(name), delta)


def fill_layer(layer: nn.Module, delta: LoRADelta) -> None:
    """Copy a delta into the LoRA parameters of a layer."""
    if isinstance(layer, Embedding):
        copy_to_shard(layer.lora_embedding_A, delta.b.T)
        copy_to_shard(layer.lora_embedding_B, delta.a.T)
        return
    assert isinstance(layer, Linear | GroupedLinear)
    for factor, values in zip(lora_factors(layer), (delta.a, delta.b), strict=True):
        copy_to_shard(factor, values)
    if isinstance(layer, Linear) and delta.magnitude is not None:
        copy_to_shard(layer.lora_magnitude_vector, delta.magnitude)


def check_adapter_fits(directory: AdapterDir, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> set[str]:
    """Return the names of the parameters that an adapter loads. Raises UserError if it does not match the config."""
    check_same_base_config(directory, source)
    contents = read_contents(directory, source)
    return check_contents_fit(contents, read_adapter_config(directory, source, contents), model, adapter, source)


def check_can_open(directory: AdapterDir, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> None:
    """Raise UserError if the adapter of a model, saved without tensor data, could not be loaded into the same model."""
    contents = read_contents(directory, source)
    saved = adapter_config(contents, adapter.untie_embeddings)
    check_contents_fit(contents, saved, model, saved, source)


def check_contents_fit(
    contents: AdapterContents, saved: LoRAConfig, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint
) -> set[str]:
    """Return the names of the parameters that an adapter loads. Raises UserError if it does not match the config.

    `saved` is the config of the files, and `adapter` that of the model.
    """
    directory = contents.directory
    layers, deltas = adapter.target_layers(model), contents.meta_deltas
    names = {name for mapping in contents.saved_mappings for name in mapping.ours}
    required = {*saved_parameters(model, adapter, source)}
    optional = {name + WEIGHT for name in TIED_MODULES} if model.spec.tie_word_embeddings else set()
    family, hint = source.family, f"{directory.peft.trained_for}, or has other targets"
    if extra := [*(name + WEIGHT for name in deltas if name not in layers), *sorted(names - required)]:
        name = transformers_key(extra[0], family).hub[0]
        raise UserError(f"{directory.file}: {name} is not a target in this model; {hint}")
    if missing := [*(name + WEIGHT for name in layers if name not in deltas), *sorted(required - names - optional)]:
        raise UserError(f"{directory.file}: no weights for {transformers_key(missing[0], family).hub[0]}; {hint}")
    if not source.spec.tie_word_embeddings:
        saved = replace(saved, untie_embeddings=adapter.untie_embeddings)
    check_same_options(directory, adapter, saved)
    token_rows.check_same_tokens(directory, model, contents.token_ids)
    sizes = adapter.ranks_and_alphas(layers)
    for name, delta in deltas.items():
        actual_sizes = delta.rank, effective_alpha(delta, adapter)
        for key, expected, actual in zip(("rank", "alpha"), sizes[name], actual_sizes, strict=True):
            if not math.isclose(expected, actual, rel_tol=1e-9):
                problem = f"{expected}, but the adapter in {directory.path} has {actual} for {name}"
                raise UserError(f"adapter.{key}: {problem}. Set adapter.{key}={actual:g}.")
    return names | {name for name, _ in model.named_parameters() if ".lora_" in name}


def check_same_base_config(adapter: AdapterDir, source: HFCheckpoint) -> None:
    """Raise UserError if an adapter was trained with `config_overrides` that the base does not have."""
    section = model_section(dict(source.config))
    for key, value in adapter.config_changes.items():
        if section.get(key) != value:
            problem = f"the adapter in {adapter.path} was trained with {json.dumps(value)}"
            problem += f", got {json.dumps(section.get(key))}"
            raise UserError(f"config_overrides.{key}: {problem}. Set the value of the adapter.")


def check_same_options(directory: AdapterDir, adapter: LoRAConfig, saved: LoRAConfig) -> None:
    """Raise UserError if an adapter config differs from that of the files in a way that changes the result."""
    config_values, saved_values = ({"kind": kind_name(type(config)), **vars(config)} for config in (adapter, saved))
    for key in ("kind", "use_rslora", "bias", "untie_embeddings"):
        if config_values[key] != saved_values[key]:
            raise UserError(
                f"adapter.{key}: {config_values[key]}, but the adapter in {directory.path} has {saved_values[key]}"
            )
