"""Frozen models that are in memory with the trained model: a reference copy or a teacher."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tunekit import build
from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.distributed.parallelize import parallelize_fake
from tunekit.hub import download
from tunekit.models.precision import PrecisionConfig
from tunekit.plan.layer_profile import CPU, ParamSize, ProbeStep, inference_memory, param_sizes
from tunekit.quantization.config import NoQuantization

CONFIG = download.Files(("config.json", "adapter_config.json", "adapter_model.safetensors"))


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

    def get_memory(self, sizes: ParallelDims, step: ProbeStep) -> AuxiliaryModelMemory:
        """Return the memory of one rank for the batch of a step, cached."""
        options = sizes.tp, sizes.ep, sizes.cp, step.rows, step.length, step.device
        key = self.source.spec, repr((str(self.source.path), self.quantization, self.precision, self.adapter, options))
        if key not in MODEL_MEMORY:
            MODEL_MEMORY[key] = self.measure_memory(sizes, step)
        return MODEL_MEMORY[key]

    def measure_memory(self, sizes: ParallelDims, step: ProbeStep) -> AuxiliaryModelMemory:
        net = build.build_meta_model(self.source, self.quantization, self.adapter)
        parallelize_fake(net, sizes)
        stored = self.source.dtypes if self.source.has_weights else dict.fromkeys(net.shapes, self.source.default_dtype)
        self.precision.apply(net.requires_grad_(False), stored, CPU)
        layers = [list(param_sizes(layer, {})) for layer in net.layers]
        inner = {id(p) for layer in net.layers for p in layer.parameters()}
        return AuxiliaryModelMemory(list(param_sizes(net, {}, inner)), layers, inference_memory(net, step))


def num_reference_passes(options: dict[str, Any], models: tuple[AuxiliaryModel, ...]) -> int:
    """Number of additional forward passes in which the trained model, without its adapter, is the reference."""
    reference = options.get("reference")
    return int(reference is not None and not models and reference.needs_forward_pass(options["loss"]))


def auxiliary_models(
    options: dict[str, Any], source: HFCheckpoint, precision: PrecisionConfig
) -> Iterator[AuxiliaryModel]:
    """Yield the auxiliary models of a config: a copy of the initial model, an online teacher."""
    reference, teacher = options.get("reference"), options.get("teacher")
    if reference is not None and reference.copies(options["adapter"], options["loss"]):
        adapter = options["adapter"] if isinstance(options["adapter"], LoRAConfig) else FrozenModel()
        yield AuxiliaryModel("the copy", source, options["quantization"], precision, without_initial_adapter(adapter))
    if teacher is not None and teacher.runs_in_each_step():
        teacher_source, adapter = open_model(teacher.model)
        yield AuxiliaryModel(
            "the teacher", teacher_source, teacher.quantization, teacher.precision, adapter, encloses_student=True
        )


def open_model(name: str) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig]:
    """Open a checkpoint, an adapter with its base, or the output of a run. Needs no tokenizer."""
    path = build.final_dir_of(download.resolve_model_dir(name, CONFIG))
    if not (path / peft_adapter.CONFIG).is_file():
        return HFCheckpoint.open(path, name), FrozenModel()
    base = peft_adapter.PeftConfigFile.open(path).base_name
    source = peft_adapter.with_adapter_score_head(
        path, HFCheckpoint.open(download.resolve_model_dir(base, CONFIG), base)
    )
    return source, peft_adapter.read_adapter_config(path, source)


def without_initial_adapter(adapter: NoAdapter | LoRAConfig) -> NoAdapter | LoRAConfig:
    """Remove the path of the initial adapter weights, which a plan does not read."""
    return adapter if adapter.adapter_path is None else replace(adapter, adapter_path=None)  # pyright: ignore


def list_omissions(options: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each cost that the plan does not include."""
    if (policy := options.get("on_policy")) is not None and policy.lmbda:
        yield "not planned: generation by the student: its time and its KV cache"
    if options.get("reference") is not None:
        yield "planned without shared prompts, which save memory and time"
    if (teacher := options.get("teacher")) is not None and not teacher.runs_in_each_step():
        yield "not planned: the teacher, which is in memory only while it precomputes its logits"
    if options.get("forgetting") is not None:
        yield "not planned: the time of the forgetting evaluation"
