"""Memory of a rank, phase by phase: what was measured of each kind of layer, one after the other as the model has them.

Weights that are sharded are held in parts and gathered a layer at a time, as distributed/fsdp.py has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from tunekit.distributed.fsdp import MAX_UNREDUCED_FRACTION
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.kernels.cross_entropy import CHUNK_BYTES, TOKEN_MULTIPLE
from tunekit.plan import onednn_cache
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import LayerPass, MemoryInterval, ParamSize, StepProfile
from tunekit.plan.workload import Workload, probe_step, profile_workload

PARTS = ("weights", "beside", "gradients", "optimizer", "activations", "logits", "gathered", "other", "process")
PHASES = ("load", "forward", "backward", "step", "save")
AHEAD = 2  # layers whose activations are on their way to the host or back
# Beside tensors: Python and torch on the CPU, the driver and its kernels on a GPU, buffers of its exchanges there.
PROCESS, DRIVER, EXCHANGES = 400 * 2**20, 900 * 2**20, 1024 * 2**20
GAPS = 0.03  # of the tensors on a GPU: what lies between them and can be given to none


class MemoryPeak(NamedTuple):
    """Where in a step memory is at its highest, and what it is."""

    where: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank in each phase, and of the host's memory that it takes beside."""

    phases: dict[str, MemoryPeak]
    host: int = 0

    @property
    def peak(self) -> MemoryPeak:
        return max(self.phases.values(), key=lambda moment: moment.total)

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name].total)


@dataclass
class MemoryTimeline:
    """What is held while a step goes on, and the highest moment of each phase."""

    now: dict[str, int]
    found: dict[str, MemoryPeak] = field(default_factory=dict)

    def see(self, phase: str, where: str, kind: str, most: int, gathered: int = 0) -> None:
        """A stretch in which so much is needed beside what is held."""
        parts = dict(self.now)
        parts[kind] = parts.get(kind, 0) + most
        parts["gathered"] = parts.get("gathered", 0) + gathered
        moment = MemoryPeak(where, parts)
        if phase not in self.found or moment.total > self.found[phase].total:
            self.found[phase] = moment

    def add(self, kind: str, bytes: int) -> None:
        self.now[kind] = self.now.get(kind, 0) + bytes


class AuxiliaryMemory(NamedTuple):
    """Bytes of models that are asked."""

    kept: int  # the part that a rank keeps
    passing: int  # whole, what is gathered at a time for their pass
    around: int  # and what stays so around the pass that learns
    most: int  # what else their pass takes
    every: int  # all that is gathered in a pass


@dataclass(frozen=True)
class RankMemoryModel:
    """What a rank holds of one model, whose layers have been measured."""

    task: Workload
    sizes: ParallelDims
    step: StepProfile
    travels: StepProfile  # as gathered

    @property
    def ranks(self) -> int:
        return self.sizes.fsdp_size

    @property
    def units(self) -> list[Sequence[ParamSize]]:
        """Embedding, norm and head, then every layer."""
        return [self.step.root, *(self.step.layers[kind] for kind in self.step.kinds)]

    def own(self, weight: ParamSize, bytes: int) -> int:
        """The part of so many bytes of a weight that a rank keeps: whole rows."""
        rows = weight.shape[0] if weight.shape else 1
        ranks = self.ranks // self.sizes.ep if weight.expert else self.ranks
        return -(-rows // ranks) * (bytes // rows)

    def over_all(self, bytes: Callable[[ParamSize], int]) -> int:
        """Of all weights, those of each kind of layer counted once and taken as often as there are layers."""
        parts = [(self.step.root, 1), *((unit, self.step.kinds.count(i)) for i, unit in enumerate(self.step.layers))]
        return sum(count * sum(map(bytes, unit)) for unit, count in parts)

    @cached_property
    def weights(self) -> int:
        return self.over_all(lambda weight: self.own(weight, weight.bytes))

    @cached_property
    def states(self) -> int:
        return self.over_all(lambda weight: self.own(weight, weight.state))

    @cached_property
    def reduced(self) -> int:
        """Gradients that a rank keeps."""
        return sum(map(self.gradients, self.units))

    def gradients(self, unit: Sequence[ParamSize]) -> int:
        """The part that a rank keeps of those of a unit, once all were added up, where weights are too."""
        if self.task.memory.optimizer_in_bwd:
            return 0
        return sum(self.own(weight, weight.bytes) for weight in unit if weight.trained)

    def here(self, unit: Sequence[ParamSize]) -> int:
        """The same on the device."""
        return 0 if self.hosted else self.gradients(unit)

    @cached_property
    def others(self) -> "AuxiliaryMemory":
        """Of models that are asked."""
        kept = passing = around = most = every = 0
        for second in self.task.beside:
            root, layers, needed = second.held(self.sizes, probe_step(self.task, self.sizes))
            kept += sum(self.own(weight, weight.bytes) for unit in (root, *layers) for weight in unit)
            sizes = sorted(sum(weight.bytes for weight in unit) for unit in layers)
            whole = sum(weight.bytes for weight in root) if self.flows else 0
            passing = max(passing, whole + (sum(sizes[-2:]) if self.flows else 0))
            around += whole * second.around
            every += sum(weight.bytes for unit in (root, *layers) for weight in unit) if self.flows else 0
            most = max(most, needed + (0 if second.around else self.chunk))
        return AuxiliaryMemory(kept, passing, around, most, every)

    @property
    def chunk(self) -> int:
        """Bytes of logits at most of a model that is asked."""
        every = self.task.tokens(self.sizes) * self.task.source.spec.vocab * self.task.compute.itemsize
        return min(CHUNK_BYTES[self.task.device], every // self.sizes.tp)

    @property
    def flows(self) -> bool:
        """Whether weights are gathered, and gradients scattered."""
        return self.sizes.grad_avg_size > 1

    @property
    def hosted(self) -> bool:
        """Whether parts of weights wait on the host."""
        return self.flows and self.task.parallel.cpu_offload

    def gathered(self, kind: int | None) -> int:
        """Bytes of whole weights of a kind of layer, or of the root."""
        return self.wholes[kind] if self.flows else 0

    @cached_property
    def wholes(self) -> dict[int | None, int]:
        """Bytes of whole weights, by kind of layer."""
        units = {None: self.travels.root, **dict(enumerate(self.travels.layers))}
        return {kind: sum(weight.bytes for weight in unit) for kind, unit in units.items()}

    @cached_property
    def before(self) -> list[int]:
        """Bytes of the whole weights of the first so many layers."""
        return [0, *accumulate(self.wholes[kind] for kind in self.step.kinds)]

    def whole_gradients(self, kind: int | None) -> int:
        """Bytes of whole gradients of a kind of layer, or of the root, as they are before they are added up."""
        unit = self.travels.root if kind is None else self.travels.layers[kind]
        return sum(weight.bytes for weight in unit if weight.trained)

    def exchanged(self, kind: int | None) -> int:
        """The same as they are added up: in fp32 where weights travel in fewer bits."""
        widening = 4 // self.task.compute.itemsize if self.task.parallel.all_gather_dtype == "compute" else 1
        return widening * self.whole_gradients(kind)

    @cached_property
    def waits(self) -> bool:
        """Whether whole gradients wait for the last pass of a step, as distributed/fsdp.py decides it."""
        trained = self.over_all(lambda weight: weight.bytes * weight.trained)
        return trained <= MAX_UNREDUCED_FRACTION * self.over_all(lambda weight: weight.bytes) / self.ranks


def build_memory_model(task: Workload, sizes: ParallelDims) -> RankMemoryModel:
    """The books of one rank, its layers measured."""
    step = profile_workload(task, sizes)
    travels = step
    if sizes.grad_avg_size > 1 and task.parallel.all_gather_dtype == "compute":
        travels = profile_workload(task, sizes, travels=True)
    return RankMemoryModel(task, sizes, step, travels)


def estimate_memory(books: RankMemoryModel, machine: ClusterSpec) -> MemoryEstimate:
    """The memory of one rank."""
    task, sizes, step, travels = books.task, books.sizes, books.step, books.travels
    held = {"weights": books.weights, "optimizer": books.states, "process": beside(books, machine)}
    host = 0
    if books.hosted:
        host = books.weights + books.states + books.reduced
        held["weights"] = held["optimizer"] = 0
    held["beside"] = books.others.kept
    ledger = MemoryTimeline(held)
    loading(books, ledger)
    if task.beside:
        ledger.see("forward", "the model that is asked", "other", books.others.most, books.others.passing)
    first = travels.first
    host += offloaded_bytes(books)
    passed(books, ledger, first, machine, first=True)
    if task.parts(sizes) > 1 and not books.flows:
        passed(books, ledger, travels.later, machine, first=False)
    elif task.parts(sizes) > 1:
        passed(books, ledger, first, machine, first=False)
    ledger.see("step", "step of the optimizer", "other", 0 if books.hosted else step.update.most)
    ledger.now["gradients"] = 0
    saving(books, ledger)
    return MemoryEstimate({name: spread(ledger.found[name], machine) for name in PHASES}, host)


def beside(books: RankMemoryModel, machine: ClusterSpec) -> int:
    """What a process takes that is no tensor."""
    if machine.kind is None:
        sparse = any(weight.expert for unit in books.step.layers for weight in unit)
        return PROCESS + (
            onednn_cache.KEPT * onednn_cache.onednn_kernel_bytes()
            if sparse and books.task.compute == torch.bfloat16
            else 0
        )
    return DRIVER + (EXCHANGES if machine.devices > 1 else 0)


def spread(moment: MemoryPeak, machine: ClusterSpec) -> MemoryPeak:
    """With what lies between tensors on a GPU."""
    if machine.kind is None:
        return moment
    parts = dict(moment.parts)
    parts["process"] += round(GAPS * (moment.total - parts["process"]))
    return MemoryPeak(moment.where, parts)


def loading(books: RankMemoryModel, ledger: MemoryTimeline) -> None:
    """A whole tensor is read at a time, unless it can be taken as it is."""
    every = [weight for unit in books.units for weight in unit]
    widest = max(weight.bytes for weight in every)
    state = ledger.now.pop("optimizer")
    packed = 8 if books.task.quantization.keeps_prequantized else 1  # fp32 in place of half a byte
    ledger.see("load", "reading the largest tensor", "other", widest * packed)
    ledger.now["optimizer"] = state


def saving(books: RankMemoryModel, ledger: MemoryTimeline) -> None:
    """A layer at a time is written, read again and compared."""
    layer = max(sum(weight.bytes for weight in unit) for unit in books.step.layers)
    ledger.see("save", "a layer is compared with what was written", "other", layer)


def offloaded_bytes(books: RankMemoryModel) -> int:
    """Bytes of activations that wait on the host in a pass."""
    if not books.task.memory.activation_offloading:
        return 0
    return sum(books.travels.first.layers[kind].left for kind in books.step.kinds[:-AHEAD])


def passed(books: RankMemoryModel, ledger: MemoryTimeline, step: LayerPass, machine: ClusterSpec, first: bool) -> None:
    """One micro-batch."""
    kinds, task = books.step.kinds, books.task
    root = books.gathered(None) + books.others.around
    ledger.see("forward", "embedding", "other", step.before.most, root)
    ledger.add("activations", step.before.left)
    kept: list[int] = []
    for i, kind in enumerate(kinds):
        here = step.layers[kind]
        ledger.see("forward", f"layer {i + 1} of {len(kinds)}", "other", here.most + packed(task, books, kind, machine),
                   root + flying(books, kinds, i, 1))  # fmt: skip
        kept.append(here.left)
        ledger.add("activations", kept[-1])
        if task.memory.activation_offloading and i >= AHEAD:
            ledger.add("activations", -kept[i - AHEAD])
    way_back(books, ledger, step, machine, first)


def way_back(
    books: RankMemoryModel, ledger: MemoryTimeline, step: LayerPass, machine: ClusterSpec, first: bool
) -> None:
    """From the loss to the embedding."""
    kinds, root = books.step.kinds, books.gathered(None)
    remaining = 0 if books.task.parallel.reshard_after_forward or not books.flows else books.before[-1]
    ledger.see("forward", "loss", "logits", step.head.most + larger(books, machine), root + remaining)
    ledger.add("logits", step.head.left)
    ledger.see("backward", "loss", "logits", step.head_back.most, root + remaining)
    move(books, ledger, step.head_back, None, first)
    before = 0
    for i in reversed(range(len(kinds))):
        kind, here = kinds[i], step.layers_back[kinds[i]]
        more = packed(books.task, books, kind, machine)
        flight = root + flying(books, kinds, i, -1) + before
        ledger.see("backward", f"layer {i + 1} of {len(kinds)}", "other", here.most + more, flight)
        if books.task.memory.activation_offloading and i >= AHEAD:  # comes back from the host
            ledger.add("activations", step.layers[kinds[i - AHEAD]].left)
        move(books, ledger, here, kind, first)
        before = books.exchanged(kind) if books.flows else 0
    last = step.before_back
    ledger.see("backward", "embedding", "other", last.most, root + before)
    settle(books, ledger, first)


def move(books: RankMemoryModel, ledger: MemoryTimeline, here: MemoryInterval, kind: int | None, first: bool) -> None:
    """What a stretch of the way back leaves: gradients that are there now, less what was kept for it."""
    if kind is None:
        ledger.add("logits", here.left)
        return
    whole = books.whole_gradients(kind) if not books.task.memory.optimizer_in_bwd else 0
    fresh = whole if first or books.flows else 0
    ledger.add("activations", here.left - fresh)
    if first:
        unit = books.step.layers[kind]
        ledger.add("gradients", whole if books.waits and books.flows else books.here(unit))


def settle(books: RankMemoryModel, ledger: MemoryTimeline, first: bool) -> None:
    """Behind a pass nothing is held but gradients."""
    ledger.now["activations"] = ledger.now["logits"] = 0
    if first:
        ledger.add("gradients", books.here(books.step.root))


def flying(books: RankMemoryModel, kinds: Sequence[int], i: int, direction: int) -> int:
    """Whole weights of layer i and of those that are gathered ahead; of all before it if they stay."""
    if not books.flows:
        return 0
    parallel, count, before = books.task.parallel, len(kinds), books.before
    ahead = max(1, parallel.prefetch_layers)
    first, last = (i, i + ahead) if direction > 0 else (i - ahead, i)
    if not parallel.reshard_after_forward:
        first = 0
    return before[min(count, last + 1)] - before[max(0, first)]


def packed(task: Workload, books: RankMemoryModel, kind: int, machine: ClusterSpec) -> int:
    """A GPU writes a weight of four bits down as numbers before it multiplies."""
    if machine.kind is None:
        return 0
    found = [weight.bytes for weight in books.step.layers[kind] if weight.name.endswith(".quantized_weight")]
    return 2 * max(found, default=0) * task.compute.itemsize


def larger(books: RankMemoryModel, machine: ClusterSpec) -> int:
    """By how much a chunk of logits is larger on a GPU."""
    if machine.kind is None:
        return 0
    task, vocab = books.task, -(-books.task.source.spec.vocab // books.sizes.tp)
    learnt = any(weight.trained and weight.name.startswith(("embed", "head")) for weight in books.step.root)
    row, parts = vocab * task.compute.itemsize, -(-task.tokens(books.sizes) // TOKEN_MULTIPLE)
    most = {device: (1 + learnt) * bytes // row // TOKEN_MULTIPLE or 1 for device, bytes in CHUNK_BYTES.items()}
    sizes = {device: TOKEN_MULTIPLE * -(-parts // -(-parts // count)) * row for device, count in most.items()}
    return sizes["cuda"] - sizes["cpu"]
