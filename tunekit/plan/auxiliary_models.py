"""Models in memory beside the one that is trained: what preference is measured against, or a teacher."""

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
    """What a rank has of a model: weights of the embedding, norm and head, of each layer, and bytes while it is asked
    beside them."""

    root: list[ParamSize]
    layers: list[list[ParamSize]]
    passing: int


MODEL_MEMORY: dict[
    tuple[Any, str], AuxiliaryModelMemory
] = {}  # by all that it depends on: other divisions of the student ask again


@dataclass(frozen=True)
class AuxiliaryModel:
    """A model that is only asked."""

    name: str
    source: HFCheckpoint
    quantization: NoQuantization
    precision: PrecisionConfig
    adapter: NoAdapter | LoRAConfig = FrozenModel()
    encloses_student: bool = False  # whether the model that is trained runs inside its pass

    def get_memory(self, sizes: ParallelDims, step: ProbeStep) -> AuxiliaryModelMemory:
        """As a rank has it, which asks about the rows of a step."""
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
    """Forward passes of the model itself that tell what it would expect without its updates."""
    reference = options.get("reference")
    return int(reference is not None and not models and reference.asks(options["loss"]))


def auxiliary_models(
    options: dict[str, Any], source: HFCheckpoint, precision: PrecisionConfig
) -> Iterator[AuxiliaryModel]:
    """What a recipe's choices keep: a copy of what training begins with, a teacher that is asked in each step."""
    reference, teacher = options.get("reference"), options.get("teacher")
    if reference is not None and reference.copies(options["adapter"], options["loss"]):
        adapter = options["adapter"] if isinstance(options["adapter"], LoRAConfig) else FrozenModel()
        yield AuxiliaryModel("the copy", source, options["quantization"], precision, without_initial_adapter(adapter))
    if teacher is not None and "logits_dir" not in vars(teacher):
        teacher_source, adapter = open_model(teacher.model)
        yield AuxiliaryModel(
            "the teacher", teacher_source, teacher.quantization, teacher.precision, adapter, encloses_student=True
        )


def open_model(name: str) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig]:
    """A checkpoint, an adapter on its base, or what a run has left; no tokenizer is asked for."""
    path = build.final_dir_of(download.resolve_model_dir(name, CONFIG))
    if not (path / peft_adapter.CONFIG).is_file():
        return HFCheckpoint.open(path, name), FrozenModel()
    base = peft_adapter.base_model_name(path)
    source = peft_adapter.with_adapter_score_head(
        path, HFCheckpoint.open(download.resolve_model_dir(base, CONFIG), base)
    )
    return source, peft_adapter.read_adapter_config(path, source)


def without_initial_adapter(adapter: NoAdapter | LoRAConfig) -> NoAdapter | LoRAConfig:
    """As large as it is, without the numbers that it begins with."""
    return adapter if adapter.adapter_path is None else replace(adapter, adapter_path=None)  # pyright: ignore


def list_omissions(options: dict[str, Any]) -> Iterator[str]:
    """What a plan leaves out, for people."""
    if (policy := options.get("on_policy")) is not None and policy.lmbda:
        yield "not planned: the student's own answers, the time they take and the keys and values that they need"
    if options.get("reference") is not None:
        yield "planned as if no prompt were shared: those that are computed once save memory and time"
    if (teacher := options.get("teacher")) is not None and "logits_dir" in vars(teacher):
        yield "not planned: the teacher, which is in memory only while it writes what it expects, once"
    if options.get("forgetting") is not None:
        yield "not planned: the time of looking for what is forgotten"
