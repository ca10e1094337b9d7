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

REQUIRED_FIELDS = (
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
PROFILES: dict[
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
    docs_per_row: int = 1  # documents of a row, which are rows of their own in a pass
    auxiliary: tuple[AuxiliaryModel, ...] = ()  # models that are asked
    num_reference_passes: int = 0  # forward passes beside those that learn, of the same model
    omissions: tuple[str, ...] = ()  # what is not planned
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

    def num_micro_batches(self, sizes: ParallelDims) -> int:
        """Forward passes of a step."""
        return -(-self.rows(sizes) // self.micro_batch_size)

    def tokens(self, sizes: ParallelDims) -> int:
        """Tokens of a rank in one forward pass."""
        length = self.max_length if sizes.cp == 1 else 2 * -(-self.max_length // (2 * sizes.cp))
        return self.micro(sizes) * self.docs_per_row * length


def make_workload(cfg: Any, machine: ClusterSpec) -> Workload:
    """What a config trains; UserError if it trains nothing."""
    options = vars(cfg)
    if missing := [name for name in REQUIRED_FIELDS if name not in options]:
        raise UserError(f"there is nothing to plan: this recipe trains no model (it has no `{missing[0]}`)")
    source = headed(cfg, HFCheckpoint.open(download.resolve_model_dir(options["model"], CONFIG), options["model"]))
    precision = settled_precision(options["precision"], machine)
    device = "cpu" if machine.kind is None else "cuda"
    copied_fields = ("adapter", "memory", "optimizer")
    mix = resolve_mixture(MixtureBase.from_config(options["data"]))
    models = tuple(auxiliary_models(options, source, precision))
    return Workload(
        source=source,
        max_length=mix.capacity or mix.max_length,
        docs_per_row=1 if mix.packing else mix.docs_per_row,
        loss=proxy_loss(options, source.spec),
        auxiliary=models,
        num_reference_passes=num_reference_passes(options, models),
        omissions=(*list_omissions(options), *without_flash(machine)),
        precision=precision,
        parallel=options.get("parallel", ParallelConfig()).on(device),
        max_grad_norm=options.get("max_grad_norm", 0.0),
        random=options.get("init") == "random",
        device=device,
        flash=machine.kind is not None and machine.kind.capabilities.flash,
        global_batch_size=options["global_batch_size"],
        micro_batch_size=options["micro_batch_size"],
        quantization=options["quantization"],
        compile=options.get("compile", False),
        **{name: options[name] for name in copied_fields},
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
    has_tokenizer = (source.tokenizer_path / "tokenizer.json").is_file()
    return cfg.headed(source if has_tokenizer else replace(source, tokenizer_dir=next(iter(assets.MODELS.values()))))


def resolve_mixture(mix: MixtureBase) -> MixtureBase:
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


def profile_workload(task: Workload, sizes: ParallelDims, as_gathered: bool = False) -> StepProfile:
    """What a step needs on one rank. `travels`: weights have the dtype of products, in which they are gathered."""
    step = probe_step(task, sizes)
    dims = sizes.tp, sizes.ep, sizes.cp
    key = task.source.spec, repr((str(task.source.path), dims, task.quantization, task.precision, step, as_gathered))
    if key not in PROFILES:
        net = build_rank_model(task, sizes)
        if as_gathered:
            cast_params(net, task.compute)
        PROFILES[key] = profile_step(net, step)
    return PROFILES[key]


def probe_step(task: Workload, sizes: ParallelDims) -> ProbeStep:
    """What is measured of a step."""
    memory = replace(task.memory, activation_offloading=False)
    rows, num_micro_batches = task.micro(sizes) * task.docs_per_row, min(task.num_micro_batches(sizes), 2)
    return ProbeStep(
        task.adapter,
        memory,
        task.optimizer,
        task.loss,
        task.max_grad_norm,
        rows,
        task.max_length,
        num_micro_batches,
        task.device,
        task.flash,
    )


def cast_params(net: Decoder, dtype: torch.dtype) -> None:
    """Numbers of a model, but for packed ones, in one dtype."""
    for parameter in net.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
