"""Options of a config that determine memory and step time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.model_dir import ModelDir
from tunekit.checkpoint.token_rows import with_adapter_tokens
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.devices import check_tf32
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.distributed.parallelize import parallelize_fake
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.losses.embedding import EmbeddingLoss
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import DTYPES, PrecisionConfig, choose_compute_dtype, resolve_auto
from tunekit.models.spec import DecoderSpec
from tunekit.plan.auxiliary_models import (
    AuxiliaryModel,
    HasReference,
    HasTeacher,
    auxiliary_models,
    model_dtypes,
    model_or_preset,
    num_reference_passes,
    without_initial_adapter,
)
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import (
    CPU,
    LossFn,
    OptimizerFactory,
    ProbeStep,
    StepProfile,
    copy_one_layer_per_kind,
    profile_step,
)
from tunekit.plan.proxy_losses import proxy_loss
from tunekit.plan.rollout_cache import RolloutShape, SamplesAnswers, rollout_cache_bytes
from tunekit.quantization.config import NoQuantization

CONFIG = download.Files(("config.json",))
# By all options that the value depends on.
PROFILES: dict[tuple[DecoderSpec, str, str], StepProfile] = {}
RANK_MODELS: dict[tuple[DecoderSpec, str], Decoder] = {}


@runtime_checkable
class HasCudaGraph(Protocol):
    """A config whose steps may run as CUDA graphs."""

    cuda_graph: bool | Literal["auto"]

    def list_cuda_graph_conflicts(self) -> list[str]: ...


class StepGuardOptions(Protocol):
    """Actions on steps with NaN or spikes."""

    @property
    def can_drop_steps(self) -> bool: ...


@runtime_checkable
class TrainingOptions(build.ModelChoices, Protocol):
    """The config keys that determine memory and step time."""

    parallel: ParallelConfig
    optimizer: OptimizerFactory
    loss: Any
    global_batch_size: int
    micro_batch_size: int
    max_grad_norm: float
    step_guard: StepGuardOptions
    max_steps: int | None
    epochs: int
    forgetting: object
    generation_eval: object


@dataclass(frozen=True)
class Workload:
    """Model and training options of a recipe."""

    source: HFCheckpoint
    max_length: int  # tokens of a row
    global_batch_size: int
    micro_batch_size: int
    adapter: NoAdapter | LoRAConfig
    quantization: NoQuantization
    precision: PrecisionConfig
    memory: MemoryConfig
    optimizer: OptimizerFactory
    loss: LossFn
    parallel: ParallelConfig
    max_grad_norm: float
    random_init: bool  # whether weights are initialized randomly instead of loaded
    device: str = "cpu"  # or cuda
    flash: bool = False  # whether the device has FlashAttention
    docs_per_row: int = 1  # documents of a row, each of which is a row of the batch
    docs_per_packed_row: int = 1  # `data.max_length` that a packed row has
    auxiliary_models: tuple[AuxiliaryModel, ...] = ()  # models that only run forward
    num_reference_passes: int = 0  # additional forward passes of the trained model without gradients
    omissions: tuple[str, ...] = ()  # warnings about costs that are not planned
    compile: bool = False
    needs_graphs: bool = False  # `cuda_graph: true`: no activation checkpointing, offloading or optimizer_in_bwd
    can_drop_steps: bool = False  # the step guard may: no optimizer_in_bwd
    rollouts: RolloutShape = RolloutShape()  # answers that are sampled at once

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matmuls; `resolve_precision` has replaced `auto`, since this knows no device."""
        return DTYPES[self.precision.compute_dtype]

    def model_key(self, dims: ParallelDims) -> tuple[DecoderSpec, str]:
        """Key of all options that the model of a rank depends on."""
        options = dims.tp, dims.ep, dims.cp, self.adapter, self.quantization, self.precision, self.random_init
        return self.source.spec, repr((str(self.source.path), len(self.source.trained_ids), options))

    def rollout_cache_bytes(self, dims: ParallelDims) -> int:
        """Bytes of the keys and values of sampled answers on a rank; 0 if the recipe samples none."""
        return rollout_cache_bytes(self.source, self.rollouts, self.precision.compute_dtype, dims, self.device)

    def rows(self, dims: ParallelDims) -> int:
        """Number of rows of a rank in a step."""
        return -(-self.global_batch_size // dims.dp_size)

    def micro_batch_rows(self, dims: ParallelDims) -> int:
        """Number of rows in a micro-batch."""
        return min(self.micro_batch_size, self.rows(dims))

    def num_micro_batches(self, dims: ParallelDims) -> int:
        """Number of micro-batches in a step."""
        return -(-self.rows(dims) // self.micro_batch_size)

    def micro_batch_tokens(self, dims: ParallelDims) -> int:
        """Number of tokens of a rank in one micro-batch."""
        length = self.max_length if dims.cp == 1 else 2 * -(-self.max_length // (2 * dims.cp))
        return self.micro_batch_rows(dims) * self.docs_per_row * length


def make_workload(cfg: Any, cluster: ClusterSpec) -> Workload:
    """Build the workload of a config. Raise UserError if the recipe trains no model."""
    if not isinstance(cfg, TrainingOptions):
        raise UserError("nothing to plan: this recipe trains no model")
    model = model_or_preset(cfg.model)
    source = build.resolve_checkpoint(model, CONFIG, cfg.model_dirs)[0].with_config_overrides(cfg.config_overrides)
    source = with_head(cfg, with_new_tokens(cfg, source))
    precision = resolve_precision(cfg.precision, cluster)
    device = "cpu" if cluster.gpu is None else "cuda"
    mix = resolve_mixture(MixtureBase.from_config(cfg.data))
    models = tuple(auxiliary_models(cfg, source, precision))
    # Embeddings of several micro-batches: a step runs forward without gradients first.
    embeds_twice = isinstance(cfg.loss, EmbeddingLoss) and cfg.global_batch_size > cfg.micro_batch_size
    return Workload(
        source=source,
        max_length=mix.capacity or mix.max_length,
        docs_per_row=1 if mix.packing else mix.docs_per_row,
        docs_per_packed_row=mix.docs_per_row if mix.packing else 1,
        loss=proxy_loss(cfg.loss, source.spec, isinstance(cfg, HasReference)),
        auxiliary_models=models,
        num_reference_passes=num_reference_passes(cfg, models) + int(embeds_twice),
        omissions=(*list_omissions(cfg, cluster), *without_flash(cluster)),
        precision=precision,
        parallel=cfg.parallel.resolve_auto(device),
        max_grad_norm=cfg.max_grad_norm,
        random_init=cfg.init == "random",
        device=device,
        flash=cluster.gpu is not None and cluster.gpu.capabilities.flash,
        global_batch_size=cfg.global_batch_size,
        micro_batch_size=cfg.micro_batch_size,
        quantization=cfg.quantization,
        compile=cfg.compile,
        needs_graphs=isinstance(cfg, HasCudaGraph) and cfg.cuda_graph is True,
        can_drop_steps=cfg.step_guard.can_drop_steps,
        rollouts=RolloutShape.from_config(cfg),
        adapter=cfg.adapter,
        memory=cfg.memory,
        optimizer=cfg.optimizer,
    )


def resolve_precision(precision: PrecisionConfig, cluster: ClusterSpec) -> PrecisionConfig:
    """Resolve `auto` for a cluster. Raise UserError if the cluster does not support the dtype."""
    if cluster.gpu is None:
        precision.check(CPU)
    elif precision.compute_dtype == "tf32":
        check_tf32(cluster.gpu.label, cluster.gpu.capabilities)
    if precision.compute_dtype != "auto":
        return precision
    if cluster.gpu is None:
        return replace(precision, compute_dtype=resolve_auto("auto", CPU))
    supported = cluster.gpu.capabilities
    return replace(precision, compute_dtype=choose_compute_dtype(supported.bf16, supported.fp16))


def may_use_graphs(cfg: TrainingOptions, cluster: ClusterSpec) -> bool:
    """Whether passes may run as CUDA graphs: if the config says so, or by default on one GPU."""
    if not isinstance(cfg, HasCudaGraph) or cluster.gpu is None or cluster.devices > 1:
        return False
    return cfg.cuda_graph is True or (cfg.cuda_graph == "auto" and not cfg.list_cuda_graph_conflicts())


def list_omissions(cfg: TrainingOptions, cluster: ClusterSpec) -> Iterator[str]:
    """Yield a message for each cost that the plan does not include."""
    if may_use_graphs(cfg, cluster):
        yield "not planned: cuda_graph: up to twice the memory of activations, all gradients, and a higher speed"
    if isinstance(cfg, HasTeacher) and cfg.on_policy.lmbda:
        yield "not planned: generation by the student: its time and its KV cache"
    if isinstance(cfg, HasReference):
        yield "planned without shared prompts, which save memory and time"
    if isinstance(cfg, SamplesAnswers):
        yield "not planned: the time to sample answers"
    if isinstance(cfg, HasTeacher) and not cfg.teacher.runs_in_each_step():
        yield "not planned: the teacher, which is in memory only while it precomputes its logits"
    if cfg.forgetting is not None:
        yield "not planned: the time of the forgetting evaluation"
    if cfg.generation_eval is not None:
        yield "not planned: answers of generation_eval: their time and KV cache"


def without_flash(cluster: ClusterSpec) -> list[str]:
    """Warning for GPUs without FlashAttention, whose attention memory and time are not planned."""
    if cluster.gpu is None or cluster.gpu.capabilities.flash:
        return []
    return [f"not planned: {cluster.gpu.label} has no FlashAttention: long rows need more memory and time than this"]


def with_head(cfg: TrainingOptions, source: HFCheckpoint) -> HFCheckpoint:
    """Add the head that a recipe trains. A preset has no tokenizer; any tokenizer works, because no rows are read."""
    if not source.has_tokenizer:
        source = replace(source, tokenizer_dir=ModelDir(next(iter(assets.MODELS.values()))))
    return cfg.with_head(source)


def with_new_tokens(cfg: TrainingOptions, source: HFCheckpoint) -> HFCheckpoint:
    """Add the rows of new tokens: at most one for each token if the tokenizer is not on this machine."""
    if cfg.adapter.adapter_path is not None and AdapterDir.is_adapter(Path(cfg.adapter.adapter_path)):
        source = with_adapter_tokens(cfg.model_dirs.open(AdapterDir, Path(cfg.adapter.adapter_path)), source)
    if source.has_tokenizer:
        return source.with_new_tokens(cfg.new_tokens, cfg.new_special_tokens)
    ids = range(source.spec.vocab, source.spec.vocab + len(cfg.new_tokens) + len(cfg.new_special_tokens))
    return replace(source.with_vocab_size(ids.stop), trained_ids=tuple(ids)) if ids else source


def resolve_mixture(mix: MixtureBase) -> MixtureBase:
    """Resolve the row formats of a mixture. Return it unchanged if its files cannot be read."""
    try:
        return mix.resolve()
    except (UserError, OSError):
        return mix


def build_rank_model(workload: Workload, dims: ParallelDims) -> Decoder:
    """Build the model of one rank on the meta device, with its dtypes."""
    decoder = build.build_meta_model(workload.source, workload.quantization, without_initial_adapter(workload.adapter))
    parallelize_fake(decoder, dims)
    workload.precision.apply(decoder, {} if workload.random_init else model_dtypes(workload.source, decoder), CPU)
    return decoder


def get_rank_model(workload: Workload, dims: ParallelDims) -> Decoder:
    """Model of a rank on the meta device, cached. It must not be modified."""
    key = workload.model_key(dims)
    if key not in RANK_MODELS:
        RANK_MODELS[key] = build_rank_model(workload, dims)
    return RANK_MODELS[key]


def profile_workload(workload: Workload, dims: ParallelDims, as_gathered: bool = False) -> StepProfile:
    """Profile a step of one rank, cached. `as_gathered`: with weights in the compute dtype of their all-gather."""
    step = probe_step(workload, dims)
    key = *workload.model_key(dims), repr((step, as_gathered))
    if key not in PROFILES:
        kinds, decoder = copy_one_layer_per_kind(get_rank_model(workload, dims))
        for parameter in decoder.parameters() if as_gathered else ():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(workload.compute_dtype)
        PROFILES[key] = profile_step(decoder, kinds, step)
    return PROFILES[key]


def probe_step(workload: Workload, dims: ParallelDims) -> ProbeStep:
    """Options of the step that is profiled."""
    memory = replace(workload.memory, activation_offloading=False)
    options = workload.adapter, memory, workload.optimizer, workload.loss, workload.max_grad_norm
    rows = workload.micro_batch_rows(dims) * workload.docs_per_row
    num_micro_batches = min(workload.num_micro_batches(dims), 2)
    return ProbeStep(*options, rows, workload.max_length, num_micro_batches, workload.device, workload.flash)
