"""What a config trains: all that memory and time depend on."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from tunekit import assemble, bundled
from tunekit.adapters import Full
from tunekit.checkpoint.folder import Folder
from tunekit.data.steps.mix import Mixed
from tunekit.devices import check_tf32, has_fast_bf16
from tunekit.errors import UserError
from tunekit.formats import Plain
from tunekit.hub import fetch
from tunekit.layout.split import imagine
from tunekit.memory import Memory
from tunekit.models.decoder import Decoder
from tunekit.models.spec import DecoderSpec
from tunekit.parallel.choice import Parallel, Sizes
from tunekit.plan.machine import Machine
from tunekit.plan.probe import CPU, Loss, Measured, Optimizer, Step, measure
from tunekit.plan.second import Second, asks, beside, unstarted, untold
from tunekit.plan.stand import loss_of
from tunekit.precision import Precision

NEEDED = ("model", "data", "adapter", "weights", "precision", "memory", "optimizer", "loss", "batch", "micro_batch")
CONFIG = fetch.Files(("config.json",))
MEASURED: dict[
    tuple[DecoderSpec, str], Measured
] = {}  # by what was measured: other divisions of the same layers ask again


@dataclass(frozen=True)
class Task:
    """A recipe's choices, with the model they are for."""

    source: Folder
    length: int  # tokens of a row
    batch: int
    micro_batch: int
    adapter: Full
    weights: Plain
    precision: Precision
    memory: Memory
    optimizer: Optimizer
    loss: Loss
    parallel: Parallel
    clip: float
    random: bool  # whether weights are drawn and not read
    device: str = "cpu"  # or cuda
    flash: bool = False  # whether the device has FlashAttention
    each: int = 1  # documents of a row, which are rows of their own in a pass
    beside: tuple[Second, ...] = ()  # models that are asked
    asks: int = 0  # forward passes beside those that learn, of the same model
    untold: tuple[str, ...] = ()  # what is not planned

    @property
    def compute(self) -> torch.dtype:
        """The dtype of matmuls; `settled_precision` has replaced `auto`, since this knows no device."""
        return torch.bfloat16 if self.precision.compute == "bf16" else torch.float32

    def rows(self, sizes: Sizes) -> int:
        """Rows of a rank in a step."""
        return -(-self.batch // sizes.readers)

    def micro(self, sizes: Sizes) -> int:
        """Rows in one forward pass."""
        return min(self.micro_batch, self.rows(sizes))

    def parts(self, sizes: Sizes) -> int:
        """Forward passes of a step."""
        return -(-self.rows(sizes) // self.micro_batch)

    def tokens(self, sizes: Sizes) -> int:
        """Tokens of a rank in one forward pass."""
        part = self.length if sizes.context == 1 else 2 * -(-self.length // (2 * sizes.context))
        return self.micro(sizes) * self.each * part


def task(cfg: Any, machine: Machine) -> Task:
    """What a config trains; UserError if it trains nothing."""
    said = vars(cfg)
    if lacking := [name for name in NEEDED if name not in said]:
        raise UserError(f"there is nothing to plan: this recipe trains no model (it has no `{lacking[0]}`)")
    source = headed(cfg, Folder.open(fetch.resolve(said["model"], CONFIG), said["model"]))
    precision = settled_precision(said["precision"], machine)
    device = "cpu" if machine.kind is None else "cuda"
    taken = ("batch", "micro_batch", "adapter", "weights", "memory", "optimizer")
    mix = settled(Mixed.of(said["data"]))
    models = tuple(beside(said, source, precision))
    return Task(
        source=source,
        length=mix.capacity or mix.length,
        each=1 if mix.pack else mix.each,
        loss=loss_of(said, source.spec),
        beside=models,
        asks=asks(said, models),
        untold=(*untold(said), *without_flash(machine)),
        precision=precision,
        parallel=said.get("parallel", Parallel()).on(device),
        clip=said.get("clip", 0.0),
        random=said.get("init") == "random",
        device=device,
        flash=machine.kind is not None and machine.kind.capabilities.flash,
        **{name: said[name] for name in taken},
    )


def settled_precision(precision: Precision, machine: Machine) -> Precision:
    """The precision on a machine, without `auto`. Raise UserError if it cannot compute so."""
    if machine.kind is None:
        precision.check(CPU)
    elif precision.compute == "tf32":
        check_tf32(machine.kind.label, machine.kind.capabilities)
    if precision.compute != "auto":
        return precision
    fast = has_fast_bf16(CPU) if machine.kind is None else machine.kind.capabilities.bf16
    return replace(precision, compute="bf16" if fast else "fp32")


def without_flash(machine: Machine) -> list[str]:
    """A remark on kinds of GPU whose attention the plan does not know."""
    if machine.kind is None or machine.kind.capabilities.flash:
        return []
    return [f"not planned: {machine.kind.label} has no FlashAttention: long rows need more memory and time than this"]


@runtime_checkable
class Headed(Protocol):
    def headed(self, source: Folder) -> Folder: ...


def headed(cfg: Any, source: Folder) -> Folder:
    """With the head that a recipe trains. A preset has no tokenizer: any does where no row is read."""
    if not isinstance(cfg, Headed):
        return source
    there = (source.tokenizer / "tokenizer.json").is_file()
    return cfg.headed(source if there else replace(source, words=next(iter(bundled.MODELS.values()))))


def settled(mix: Mixed) -> Mixed:
    """What rows turn out to be, where they are here."""
    try:
        return mix.settled()
    except (UserError, OSError):
        return mix


def shown(task: Task, sizes: Sizes) -> Decoder:
    """The model of one rank, on no device, with the dtypes it has there."""
    net = assemble.outline(task.source, task.weights, unstarted(task.adapter))
    imagine(net, sizes)
    stored = {} if task.random else dtypes(task.source, net)
    task.precision.apply(net, stored, CPU)
    return net


def dtypes(source: Folder, net: Decoder) -> dict[str, torch.dtype]:
    """The dtypes of a checkpoint's weights; where only config.json is there, what that says."""
    if source.has_weights:
        return source.dtypes
    return dict.fromkeys(net.shapes, source.usual_dtype)


def measured(task: Task, sizes: Sizes, travels: bool = False) -> Measured:
    """What a step needs on one rank. `travels`: weights have the dtype of products, in which they are gathered."""
    step = step_of(task, sizes)
    divided = sizes.tensor, sizes.expert, sizes.context
    key = task.source.spec, repr((str(task.source.path), divided, task.weights, task.precision, step, travels))
    if key not in MEASURED:
        net = shown(task, sizes)
        if travels:
            narrow(net, task.compute)
        MEASURED[key] = measure(net, step)
    return MEASURED[key]


def step_of(task: Task, sizes: Sizes) -> Step:
    """What is measured of a step."""
    memory = replace(task.memory, offload=False, compile=False)
    rows, parts = task.micro(sizes) * task.each, min(task.parts(sizes), 2)
    return Step(
        task.adapter, memory, task.optimizer, task.loss, task.clip, rows, task.length, parts, task.device, task.flash
    )


def narrow(net: Decoder, dtype: torch.dtype) -> None:
    """Numbers of a model, but for packed ones, in one dtype."""
    for parameter in net.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
