"""Options that use less memory: one table for the report, `--auto`, `tune new` and the out-of-memory message."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from tunekit.adapters.config import LoRAConfig
from tunekit.errors import FieldError, UserError
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig
from tunekit.plan.estimate import Estimate, estimate
from tunekit.plan.workload import Workload
from tunekit.quantization.config import NF4Config

MIN_SAVING = 0.02  # minimum saving, as a fraction of the peak
KEYS = ("micro_batch_size", "optimizer", "max_grad_norm", "adapter", "quantization")
SECTIONS = ("precision", "memory", "parallel")
Overrides = Mapping[str, Any]  # config keys and their values


@dataclass(frozen=True)
class MemoryOption:
    """Config overrides that use less memory, their effect, and when they apply."""

    overrides: Overrides  # a value may be a function of the plan
    effect: str
    applies: Callable[[Estimate], bool]
    cost: str = ""  # other than time; empty if the result of training is equal up to rounding

    def apply(self, workload: Workload, plan: Estimate) -> Workload:
        """The workload with the overrides, whose values depend on a plan."""
        for key, value in self.overrides.items():
            value = value(plan) if callable(value) else value
            section, _, name = key.partition(".")
            value = replace(getattr(workload, section), **{name: value}) if name else value
            workload = replace(workload, **{section: value})
        return workload


def trains_all_weights(plan: Estimate) -> bool:
    return not isinstance(plan.workload.adapter, LoRAConfig)


def has_fp32_weights(plan: Estimate) -> bool:
    return plan.workload.precision.master_dtype == "fp32"


def can_step_in_backward(workload: Workload) -> bool:
    """Whether `memory.optimizer_in_bwd` is off, and compatible with the other keys."""
    is_scaled = workload.precision.compute_dtype == "fp16"
    return not (workload.memory.optimizer_in_bwd or workload.needs_graphs or workload.can_drop_steps or is_scaled)


# fmt: off
FULL_CHECKPOINTING = MemoryOption(
    {"memory.activation_checkpointing": "full"}, "recomputes each layer in the backward pass",
    lambda plan: plan.workload.memory.activation_checkpointing == "none" and not plan.workload.needs_graphs)
ADAMW_8BIT = MemoryOption(
    {"optimizer": AdamW8bitConfig()}, "optimizer states in 8 bits",
    lambda plan: type(plan.workload.optimizer) is AdamWConfig,
    "optimizer states are rounded to 8 bits, so losses differ slightly")
OPTIMIZER_IN_BWD = MemoryOption(
    {"memory.optimizer_in_bwd": True, "max_grad_norm": 0.0, "micro_batch_size": lambda p: p.workload.rows(p.dims)},
    "frees gradients immediately",
    lambda plan: trains_all_weights(plan) and can_step_in_backward(plan.workload),
    "gradients are not clipped: watch the loss, or set a lower optimizer.lr")
BF16_WEIGHTS = MemoryOption(
    {"precision.master_dtype": "bf16"}, "weights, gradients and optimizer states in bf16",
    lambda plan: trains_all_weights(plan) and has_fp32_weights(plan),
    "small updates are lost in rounding, so losses differ")
NF4 = MemoryOption(
    {"quantization": NF4Config()}, "frozen weights in 4 bits (QLoRA)",
    lambda plan: not trains_all_weights(plan) and not isinstance(plan.workload.quantization, NF4Config),
    "frozen weights are rounded to 4 bits")
SINGLE_DEVICE_OPTIONS = (
    FULL_CHECKPOINTING, ADAMW_8BIT, OPTIMIZER_IN_BWD, BF16_WEIGHTS, NF4,
    MemoryOption(
        {"memory.activation_checkpointing": "selective"},
        "recomputes norms, RoPE and activation functions in the backward pass",
        lambda plan: FULL_CHECKPOINTING.applies(plan) and not plan.workload.compile),
    MemoryOption(
        {"micro_batch_size": lambda plan: plan.workload.micro_batch_rows(plan.dims) // 2},
        "smaller micro-batches, more gradient accumulation",
        lambda plan: plan.workload.micro_batch_rows(plan.dims) > 1 and not plan.workload.memory.optimizer_in_bwd),
    MemoryOption(
        {"memory.activation_offloading": True}, "keeps activations in host memory until the backward pass",
        lambda plan: plan.cluster.gpu is not None and not plan.workload.memory.activation_offloading
        and not plan.workload.needs_graphs),
    MemoryOption(
        {"adapter": LoRAConfig()}, "trains low-rank adapters, freezes the weights",
        lambda plan: trains_all_weights(plan) and not plan.workload.random_init,
        "only adapters are trained"),
)
MULTI_DEVICE_OPTIONS = (
    MemoryOption(
        {"parallel.cpu_offload": True}, "weights, gradients and optimizer states in host memory",
        lambda plan: plan.cluster.gpu is not None and not plan.workload.parallel.cpu_offload),
    MemoryOption(
        {"parallel.reshard_after_forward": True}, "frees all-gathered weights after the forward pass of each layer",
        lambda plan: not plan.workload.parallel.reshard_after_forward),
    MemoryOption(
        {"parallel.dp_replicate": 1, "parallel.dp_shard": None}, "shards weights over all devices",
        lambda plan: plan.dims.dp_replicate > 1),
    MemoryOption(
        {"parallel.all_gather_dtype": "compute"}, "all-gather in {compute_dtype}",
        lambda plan: plan.workload.parallel.all_gather_dtype == "param" and has_fp32_weights(plan)),
    MemoryOption(
        {"parallel.tp": lambda plan: 2 * plan.workload.parallel.tp}, "shards each layer over twice as many devices",
        lambda plan: 2 * plan.workload.parallel.tp <= plan.cluster.devices_per_node),
)
# fmt: on


class PlannedOption(NamedTuple):
    """An option that applies, its overrides as text, and the plan with it."""

    option: MemoryOption
    overrides: tuple[str, ...]
    saved_bytes: int
    plan: Estimate

    @property
    def effect(self) -> str:
        return self.option.effect.format(compute_dtype=self.plan.workload.precision.compute_dtype)


def plan_options(plan: Estimate) -> list[PlannedOption]:
    """Plan each option separately, so that savings are exact. Return those that save memory, the largest first."""
    planned, options = [], SINGLE_DEVICE_OPTIONS + (MULTI_DEVICE_OPTIONS if plan.cluster.devices > 1 else ())
    for option in (option for option in options if option.applies(plan)):
        workload = option.apply(plan.workload, plan)
        try:
            new = estimate(workload, plan.cluster)
        except (UserError, FieldError):  # incompatible with other options
            continue
        if (saved := plan.peak.total - new.peak.total) > MIN_SAVING * plan.peak.total:
            planned.append(PlannedOption(option, diff_overrides(plan.workload, workload), saved, new))
    return sorted(planned, key=lambda item: -item.saved_bytes)


@runtime_checkable
class Choice(Protocol):
    """A config with a kind, such as `adapter: lora`."""

    kind: ClassVar[str]


def diff_overrides(old: Workload, new: Workload) -> tuple[str, ...]:
    """Overrides that change a workload into another one."""
    before = flatten_config(old)
    return tuple(f"{key}={text}" for key, text in flatten_config(new).items() if text != before[key])


def flatten_config(workload: Workload) -> dict[str, str]:
    """Keys of a config that options change, and their values as in YAML."""
    values = {key: getattr(workload, key) for key in KEYS}
    for section in SECTIONS:
        values |= {f"{section}.{key}": value for key, value in asdict(getattr(workload, section)).items()}
    return {key: format_value(value) for key, value in values.items()}


def format_value(value: Any) -> str:
    """Format a value as in YAML, a choice as its kind."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return value.kind if isinstance(value, Choice) else f"{value:g}" if isinstance(value, float) else str(value)
