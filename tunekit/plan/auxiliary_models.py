"""Frozen models that are in memory with the trained model: a reference copy or a teacher."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from tunekit import assets, build
from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distillation.on_policy import OnPolicyConfig
from tunekit.distillation.teacher import TeacherConfig
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.distributed.parallelize import parallelize_fake
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.plan.layer_profile import CPU, ParamSize, ProbeStep, inference_memory, param_sizes
from tunekit.quantization.config import NoQuantization

CONFIG = download.Files(("config.json", "adapter_config.json", "adapter_model.safetensors"))


class ReferenceChoice(Protocol):
    def copies(self, adapter: NoAdapter | LoRAConfig, loss: Any) -> bool: ...
    def needs_forward_pass(self, loss: Any) -> bool: ...


@runtime_checkable
class HasReference(Protocol):
    """A config of preference optimization."""

    reference: ReferenceChoice
    adapter: NoAdapter | LoRAConfig
    quantization: NoQuantization
    loss: Any


@runtime_checkable
class HasTeacher(Protocol):
    """A config of distillation."""

    teacher: TeacherConfig
    on_policy: OnPolicyConfig


class AuxiliaryModelMemory(NamedTuple):
    """Parameters of an auxiliary model on one rank (root and layers), and peak bytes of its forward pass."""

    root: list[ParamSize]
    layers: list[list[ParamSize]]
    passing: int


MODEL_MEMORY: dict[tuple[Any, str], AuxiliaryModelMemory] = {}  # cached by all options that it depends on


@dataclass(frozen=True)
class AuxiliaryModel:
    """Frozen model that only runs forward."""

    name: str
    source: HFCheckpoint
    quantization: NoQuantization
    precision: PrecisionConfig
    adapter: NoAdapter | LoRAConfig = FrozenModel()
    encloses_student: bool = False  # whether its root weights stay gathered during the training pass

    def get_memory(self, dims: ParallelDims, step: ProbeStep) -> AuxiliaryModelMemory:
        """Return the memory of one rank for the batch of a step, cached."""
        options = dims.tp, dims.ep, dims.cp, step.rows, step.length, step.device
        key = self.source.spec, repr((str(self.source.path), self.quantization, self.precision, self.adapter, options))
        if key not in MODEL_MEMORY:
            MODEL_MEMORY[key] = self.measure_memory(dims, step)
        return MODEL_MEMORY[key]

    def measure_memory(self, dims: ParallelDims, step: ProbeStep) -> AuxiliaryModelMemory:
        decoder = build.build_meta_model(self.source, self.quantization, self.adapter)
        parallelize_fake(decoder, dims)
        self.precision.apply(decoder.requires_grad_(False), model_dtypes(self.source, decoder), CPU)
        layers = [list(param_sizes(layer, {})) for layer in decoder.layers]
        inner = {id(p) for layer in decoder.layers for p in layer.parameters()}
        return AuxiliaryModelMemory(list(param_sizes(decoder, {}, inner)), layers, inference_memory(decoder, step))


def model_dtypes(source: HFCheckpoint, decoder: Decoder) -> dict[str, torch.dtype]:
    """Dtypes of the weights of a checkpoint; the default of config.json if there are no weights."""
    if source.has_weights:
        return source.dtypes
    return dict.fromkeys(decoder.shapes, source.default_dtype)


def num_reference_passes(cfg: object, models: tuple[AuxiliaryModel, ...]) -> int:
    """Number of additional forward passes in which the trained model, without its adapter, is the reference."""
    return int(isinstance(cfg, HasReference) and not models and cfg.reference.needs_forward_pass(cfg.loss))


def auxiliary_models(cfg: object, source: HFCheckpoint, precision: PrecisionConfig) -> Iterator[AuxiliaryModel]:
    """Yield the auxiliary models of a config: a copy of the initial model, an online teacher."""
    if isinstance(cfg, HasReference) and cfg.reference.copies(cfg.adapter, cfg.loss):
        adapter = cfg.adapter if isinstance(cfg.adapter, LoRAConfig) else FrozenModel()
        yield AuxiliaryModel("the copy", source, cfg.quantization, precision, without_initial_adapter(adapter))
    if isinstance(cfg, HasTeacher) and (teacher := cfg.teacher).runs_in_each_step():
        teacher_source, adapter = build.resolve_checkpoint(model_or_preset(teacher.model), CONFIG)
        options = teacher.quantization, teacher.precision, without_initial_adapter(adapter)
        yield AuxiliaryModel("the teacher", teacher_source, *options, encloses_student=True)


def model_or_preset(name: str) -> str:
    """The model; if its config.json cannot be downloaded, the preset with its shape. Prints a note then."""
    try:
        download.resolve_model_dir(name, CONFIG)
    except UserError as error:
        preset = assets.find_preset(name) if download.split_repo_revision(name) else None
        if preset is None:
            raise
        print(f"{str(error).removesuffix('.')}. Planning with the preset {preset}.", file=sys.stderr)
        return preset
    return name


def without_initial_adapter(adapter: NoAdapter | LoRAConfig) -> NoAdapter | LoRAConfig:
    """Remove the path of the initial adapter weights, which a plan does not read."""
    return adapter if adapter.adapter_path is None else replace(adapter, adapter_path=None)  # pyright: ignore
