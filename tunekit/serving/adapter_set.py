"""Several LoRA adapters of one model, of which one is active: they share the base weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tunekit import build
from tunekit.adapters.config import Layer, LoRAConfig, adapter_tensors
from tunekit.checkpoint import load_adapter
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.model_dir import ModelDirs
from tunekit.checkpoint.peft_reader import read_contents
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.models.decoder import Decoder

LayerState = dict[str, Any]  # attributes of a layer that an adapter sets


class AdapterSet:
    """Loads adapters and switches between them by replacing attributes of the adapted layers. No weights are copied."""

    def __init__(self, model: Decoder, base: HFCheckpoint) -> None:
        self.model, self.base = model, base
        self.states: dict[str, dict[str, LayerState]] = {}  # by adapter, then by layer
        self.active: str | None = None

    def load(self, name: str, path: str, dirs: ModelDirs | None = None) -> None:
        """Load an adapter in PEFT's format: a directory, a run, or a Hub name. Raises UserError if it does not fit."""
        adapter, directory = read_adapter(f"adapter {name}={path}", path, self.base, dirs)
        active = self.active
        self.activate(None)
        adapter.apply(self.model)
        layers = adapter.target_layers(self.model)
        try:
            for layer in layers.values():
                allocate_adapter(layer, self.model.device)
            load_adapter.check_adapter_fits(directory, self.model, adapter, self.base)
            load_adapter.load_adapter(directory, self.model, self.base)
        finally:
            state = {key: detach_adapter(layer) for key, layer in layers.items()}
            self.activate(active)
        self.states = {**self.states, name: state}  # another thread may iterate over the old ones

    def remove(self, name: str) -> None:
        """Forget an adapter that is not active."""
        assert name != self.active
        self.states = {key: state for key, state in self.states.items() if key != name}

    def activate(self, name: str | None) -> None:
        """Use an adapter, or with None the base model alone."""
        if name == self.active:
            return
        for key in self.states.get(self.active or "", {}):
            detach_adapter(self.model.get_submodule(key))
        for key, state in self.states[name].items() if name is not None else ():
            layer = self.model.get_submodule(key)
            for attribute, value in state.items():
                setattr(layer, attribute, value)
        self.active = name


def read_adapter(
    where: str, path: str, base: HFCheckpoint, dirs: ModelDirs | None = None
) -> tuple[LoRAConfig, AdapterDir]:
    """An adapter of `base` that changes only its layers. Errors start with `where`. Reads no weights."""
    own_base, adapter = build.resolve_checkpoint(path, download.READ, dirs)
    if not isinstance(adapter, LoRAConfig) or own_base.adapter is None:
        raise UserError(f"{where}: is not an adapter. Serve it as the model.")
    extra: Mapping[str, Any] = {
        "modules_to_save": adapter.modules_to_save,
        "trainable_token_indices": adapter.trainable_token_indices,
        "bias": () if adapter.bias == "none" else adapter.bias,
        "untie_embeddings": adapter.untie_embeddings,
    }
    for key, value in extra.items():
        if value:
            problem = f"has {key}, which cannot be switched between requests"
            raise UserError(f"{where}: {problem}. Serve it as the model, or use `tune merge`.")
    try:
        read_contents(own_base.adapter, base)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return adapter, own_base.adapter


def allocate_adapter(layer: Layer, device: torch.device) -> None:
    """Allocate the parameters of a new adapter, in fp32 as in training."""
    for key, tensor in adapter_tensors(layer).items():
        owner, _, attribute = key.rpartition(".")
        value = torch.zeros(tensor.shape, dtype=torch.float32, device=device)
        parameter = nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
        setattr(layer.get_submodule(owner), attribute, parameter)


def detach_adapter(layer: nn.Module) -> LayerState:
    """Remove an adapter from a layer, and return what it has set."""
    names = [*vars(layer), *(name for table in (layer._modules, layer._parameters, layer._buffers) for name in table)]
    state = {name: getattr(layer, name) for name in names if name.startswith("lora_") or name == "update"}
    for name in state:
        delattr(layer, name)
    return state
