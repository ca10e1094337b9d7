"""What a config trains: all that memory and time depend on."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from tunekit import assets, build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.devices import check_tf32, has_fast_bf16
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.distributed.parallelize import parallelize_fake
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec
from tunekit.plan.auxiliary_models import (
    AuxiliaryModel,
    auxiliary_models,
    list_omissions,
    num_reference_passes,
    without_initial_adapter,
)
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import CPU, LossFn, OptimizerFactory, ProbeStep, StepProfile, profile_step
from tunekit.plan.proxy_losses import proxy_loss
from tunekit.quantization.config import NoQuantization

NEEDED = (
    "model",
    "data",
    "adapter",
    "quantization",
    "precision",
    "memory",
    "optimizer",
    "loss",
    "global_batch_size",
    "micro_batch_size",
)
CONFIG = download.Files(("config.json",))
MEASURED: dict[
    tuple[DecoderSpec, str], StepProfile
] = {}  # by what was measured: other divisions of the same layers ask again


@dataclass(frozen=True)
class Workload:
    """A recipe's choices, with the model they are for."""

    source: HFCheckpoint
    max_length: int  # tokens of a row
    global_batch_size: int
    micro_batch_size: int
    adapter: NoAdapter
    quantization: NoQuantization
    precision: PrecisionConfig
    memory: MemoryConfig
    optimizer: OptimizerFactory
    loss: LossFn
    parallel: ParallelConfig
    max_grad_norm: float
    random: bool  # whether weights are drawn and not read
    device: str = "cpu"  # or cuda
    flash: bool = False  # whether the device has FlashAttention
    each: int = 1  # documents of a row, which are rows of their own in a pass
    beside: tuple[AuxiliaryModel, ...] = ()  # models that are asked
    asks: int = 0  # forward passes beside those that learn, of the same model
    untold: tuple[str, ...] = ()  # what is not planned
    compile: bool = False

    @property
    def compute(self) -> torch.dtype:
        """The dtype of matmuls; `settled_precision` has replaced `auto`, since this knows no device."""
        return torch.bfloat16 if self.precision.compute_dtype == "bf16" else torch.float32

    def rows(self, sizes: ParallelDims) -> int:
        """Rows of a rank in a step."""
        return -(-self.global_batch_size // sizes.dp_size)

    def micro(self, sizes: ParallelDims) -> int:
        """Rows in one forward pass."""
        return min(self.micro_batch_size, self.rows(sizes))

    def parts(self, sizes: ParallelDims) -> int:
        """Forward passes of a step."""
        return -(-self.rows(sizes) // self.micro_batch_size)

    def tokens(self, sizes: ParallelDims) -> int:
        """Tokens of a rank in one forward pass."""
        part = self.max_length if sizes.cp == 1 else 2 * -(-self.max_length // (2 * sizes.cp))
        return self.micro(sizes) * self.each * part


def make_workload(cfg: Any, machine: ClusterSpec) -> Workload:
    """What a config trains; UserError if it trains nothing."""
    said = vars(cfg)
    if lacking := [name for name in NEEDED if name not in said]:
        raise UserError(f"there is nothing to plan: this recipe trains no model (it has no `{lacking[0]}`)")
    source = headed(cfg, HFCheckpoint.open(download.resolve_model_dir(said["model"], CONFIG), said["model"]))
    precision = settled_precision(said["precision"], machine)
    device = "cpu" if machine.kind is None else "cuda"
    taken = ("adapter", "memory", "optimizer")
    mix = settled(MixtureBase.from_config(said["data"]))
    models = tuple(auxiliary_models(said, source, precision))
    return Workload(
        source=source,
        max_length=mix.capacity or mix.max_length,
        each=1 if mix.packing else mix.docs_per_row,
        loss=proxy_loss(said, source.spec),
        beside=models,
        asks=num_reference_passes(said, models),
        untold=(*list_omissions(said), *without_flash(machine)),
        precision=precision,
        parallel=said.get("parallel", ParallelConfig()).on(device),
        max_grad_norm=said.get("max_grad_norm", 0.0),
        random=said.get("init") == "random",
        device=device,
        flash=machine.kind is not None and machine.kind.capabilities.flash,
        global_batch_size=said["global_batch_size"],
        micro_batch_size=said["micro_batch_size"],
        quantization=said["quantization"],
        compile=said.get("compile", False),
        **{name: said[name] for name in taken},
    )


def settled_precision(precision: PrecisionConfig, machine: ClusterSpec) -> PrecisionConfig:
    """The precision on a machine, without `auto`. Raise UserError if it cannot compute so."""
    if machine.kind is None:
        precision.check(CPU)
    elif precision.compute_dtype == "tf32":
        check_tf32(machine.kind.label, machine.kind.capabilities)
    if precision.compute_dtype != "auto":
        return precision
    fast = has_fast_bf16(CPU) if machine.kind is None else machine.kind.capabilities.bf16
    return replace(precision, compute_dtype="bf16" if fast else "fp32")


def without_flash(machine: ClusterSpec) -> list[str]:
    """A remark on kinds of GPU whose attention the plan does not know."""
    if machine.kind is None or machine.kind.capabilities.flash:
        return []
    return [f"not planned: {machine.kind.label} has no FlashAttention: long rows need more memory and time than this"]


@runtime_checkable
class HasHead(Protocol):
    def headed(self, source: HFCheckpoint) -> HFCheckpoint: ...


def headed(cfg: Any, source: HFCheckpoint) -> HFCheckpoint:
    """With the head that a recipe trains. A preset has no tokenizer: any does where no row is read."""
    if not isinstance(cfg, HasHead):
        return source
    there = (source.tokenizer_path / "tokenizer.json").is_file()
    return cfg.headed(source if there else replace(source, tokenizer_dir=next(iter(assets.MODELS.values()))))


def settled(mix: MixtureBase) -> MixtureBase:
    """What rows turn out to be, where they are here."""
    try:
        return mix.resolve()
    except (UserError, OSError):
        return mix


def build_rank_model(task: Workload, sizes: ParallelDims) -> Decoder:
    """The model of one rank, on no device, with the dtypes it has there."""
    net = build.build_meta_model(task.source, task.quantization, without_initial_adapter(task.adapter))
    parallelize_fake(net, sizes)
    stored = {} if task.random else dtypes(task.source, net)
    task.precision.apply(net, stored, CPU)
    return net


def dtypes(source: HFCheckpoint, net: Decoder) -> dict[str, torch.dtype]:
    """The dtypes of a checkpoint's weights; where only config.json is there, what that says."""
    if source.has_weights:
        return source.dtypes
    return dict.fromkeys(net.shapes, source.default_dtype)


def profile_workload(task: Workload, sizes: ParallelDims, travels: bool = False) -> StepProfile:
    """What a step needs on one rank. `travels`: weights have the dtype of products, in which they are gathered."""
    step = probe_step(task, sizes)
    divided = sizes.tp, sizes.ep, sizes.cp
    key = task.source.spec, repr((str(task.source.path), divided, task.quantization, task.precision, step, travels))
    if key not in MEASURED:
        net = build_rank_model(task, sizes)
        if travels:
            narrow(net, task.compute)
        MEASURED[key] = profile_step(net, step)
    return MEASURED[key]


def probe_step(task: Workload, sizes: ParallelDims) -> ProbeStep:
    """What is measured of a step."""
    memory = replace(task.memory, activation_offloading=False)
    rows, parts = task.micro(sizes) * task.each, min(task.parts(sizes), 2)
    return ProbeStep(
        task.adapter,
        memory,
        task.optimizer,
        task.loss,
        task.max_grad_norm,
        rows,
        task.max_length,
        parts,
        task.device,
        task.flash,
    )


def narrow(net: Decoder, dtype: torch.dtype) -> None:
    """Numbers of a model, but for packed ones, in one dtype."""
    for parameter in net.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
