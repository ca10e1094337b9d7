"""Memory of a rank in each phase of a step, composed from the profile of each kind of layer.

Sharded weights are gathered layer by layer, as in distributed/fsdp.py.
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

OFFLOAD_WINDOW = 2  # layers whose activations are being copied to or from the host
# Memory that is not in tensors: Python and torch on the CPU; driver, kernels and NCCL buffers on a GPU.
PROCESS, DRIVER, COMM_BUFFER_BYTES = 400 * 2**20, 900 * 2**20, 1024 * 2**20
FRAGMENTATION = 0.03  # fraction of the tensor bytes on a GPU that fragmentation wastes


class MemoryPeak(NamedTuple):
    """Highest memory of a phase: where it occurs, and its bytes by component."""

    where: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank in each phase, and the host memory that it uses for offloading."""

    phases: dict[str, MemoryPeak]
    host: int = 0

    @property
    def peak(self) -> MemoryPeak:
        return max(self.phases.values(), key=lambda moment: moment.total)

    @property
    def phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: self.phases[name].total)


class AuxiliaryMemory(NamedTuple):
    """Bytes of the auxiliary models on one rank."""

    weights: int  # local shards
    gathered: int  # gathered weights at one time during their forward pass
    gathered_root: int  # gathered weights that stay during the training pass
    peak: int  # activations of their forward pass
    all_gathered: int  # all weights that are gathered in one pass


@dataclass(frozen=True)
class RankMemoryModel:
    """Memory model of one rank, based on the profile of each kind of layer."""

    task: Workload
    sizes: ParallelDims
    step: StepProfile
    gathered_step: StepProfile  # profile with weights in the dtype in which they are gathered

    @property
    def ranks(self) -> int:
        return self.sizes.fsdp_size

    @property
    def units(self) -> list[Sequence[ParamSize]]:
        """Parameters of the root (embedding, norm, head), then those of each layer."""
        return [self.step.root, *(self.step.layers[kind] for kind in self.step.kinds)]

    def shard_bytes(self, weight: ParamSize, bytes: int) -> int:
        """Bytes of the local shard of a weight with `bytes` in total. Weights are sharded by rows."""
        rows = weight.shape[0] if weight.shape else 1
        ranks = self.ranks // self.sizes.ep if weight.expert else self.ranks
        return -(-rows // ranks) * (bytes // rows)

    def sum_over_params(self, bytes: Callable[[ParamSize], int]) -> int:
        """Sum over all weights. Each kind of layer is evaluated once and multiplied by its number of layers."""
        parts = [(self.step.root, 1), *((unit, self.step.kinds.count(i)) for i, unit in enumerate(self.step.layers))]
        return sum(count * sum(map(bytes, unit)) for unit, count in parts)

    @cached_property
    def weights(self) -> int:
        return self.sum_over_params(lambda weight: self.shard_bytes(weight, weight.bytes))

    @cached_property
    def states(self) -> int:
        return self.sum_over_params(lambda weight: self.shard_bytes(weight, weight.state))

    @cached_property
    def reduced(self) -> int:
        """Bytes of the gradients that a rank keeps."""
        return sum(map(self.gradients, self.units))

    def gradients(self, unit: Sequence[ParamSize]) -> int:
        """Bytes of the local gradient shards of a unit after the reduction."""
        if self.task.memory.optimizer_in_bwd:
            return 0
        return sum(self.shard_bytes(weight, weight.bytes) for weight in unit if weight.trained)

    def device_gradient_bytes(self, unit: Sequence[ParamSize]) -> int:
        """Bytes of the local gradient shards that stay on the device."""
        return 0 if self.is_cpu_offloaded else self.gradients(unit)

    @cached_property
    def auxiliary(self) -> "AuxiliaryMemory":
        """Memory of all auxiliary models."""
        weights = gathered = gathered_root = peak = all_gathered = 0
        for model in self.task.auxiliary:
            root, layers, pass_bytes = model.get_memory(self.sizes, probe_step(self.task, self.sizes))
            weights += sum(self.shard_bytes(weight, weight.bytes) for unit in (root, *layers) for weight in unit)
            sizes = sorted(sum(weight.bytes for weight in unit) for unit in layers)
            root_bytes = sum(weight.bytes for weight in root) if self.has_collectives else 0
            gathered = max(gathered, root_bytes + (sum(sizes[-2:]) if self.has_collectives else 0))
            gathered_root += root_bytes * model.encloses_student
            all_gathered += (
                sum(weight.bytes for unit in (root, *layers) for weight in unit) if self.has_collectives else 0
            )
            peak = max(peak, pass_bytes + (0 if model.encloses_student else self.chunk))
        return AuxiliaryMemory(weights, gathered, gathered_root, peak, all_gathered)

    @property
    def chunk(self) -> int:
        """Maximum bytes of a chunk of logits of an auxiliary model."""
        logits_bytes = self.task.tokens(self.sizes) * self.task.source.spec.vocab * self.task.compute.itemsize
        return min(CHUNK_BYTES[self.task.device], logits_bytes // self.sizes.tp)

    @property
    def has_collectives(self) -> bool:
        """Whether weights are gathered and gradients are reduced."""
        return self.sizes.grad_avg_size > 1

    @property
    def is_cpu_offloaded(self) -> bool:
        """Whether weight shards are offloaded to the host."""
        return self.has_collectives and self.task.parallel.cpu_offload

    def gathered(self, kind: int | None) -> int:
        """Bytes of the gathered weights of a kind of layer; None: of the root."""
        return self.full_weight_bytes[kind] if self.has_collectives else 0

    @cached_property
    def full_weight_bytes(self) -> dict[int | None, int]:
        """Bytes of the unsharded weights by kind of layer; None: of the root."""
        units = {None: self.gathered_step.root, **dict(enumerate(self.gathered_step.layers))}
        return {kind: sum(weight.bytes for weight in unit) for kind, unit in units.items()}

    @cached_property
    def before(self) -> list[int]:
        """Bytes of the unsharded weights of the first i layers, for each i."""
        return [0, *accumulate(self.full_weight_bytes[kind] for kind in self.step.kinds)]

    def full_gradient_bytes(self, kind: int | None) -> int:
        """Bytes of the unsharded gradients of a kind of layer, or of the root, before the reduction."""
        unit = self.gathered_step.root if kind is None else self.gathered_step.layers[kind]
        return sum(weight.bytes for weight in unit if weight.trained)

    def reduced_gradient_bytes(self, kind: int | None) -> int:
        """Bytes of the same gradients in the reduction: fp32 if weights are gathered in the compute dtype."""
        widening = 4 // self.task.compute.itemsize if self.task.parallel.all_gather_dtype == "compute" else 1
        return widening * self.full_gradient_bytes(kind)

    def gathered_layers(self, i: int, direction: int) -> int:
        """Bytes of the gathered weights of layer i, of prefetched layers, and of earlier ones that stay gathered."""
        if not self.has_collectives:
            return 0
        num_prefetched = max(1, self.task.parallel.prefetch_layers)
        first, last = (i, i + num_prefetched) if direction > 0 else (i - num_prefetched, i)
        if not self.task.parallel.reshard_after_forward:
            first = 0
        return self.before[min(len(self.step.kinds), last + 1)] - self.before[max(0, first)]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of activations that a micro-batch offloads to the host."""
        if not self.task.memory.activation_offloading:
            return 0
        return sum(self.gathered_step.first.layers[kind].retained for kind in self.step.kinds[:-OFFLOAD_WINDOW])

    @cached_property
    def delays_reduction(self) -> bool:
        """Whether gradients are reduced only in the last micro-batch of a step, as in distributed/fsdp.py."""
        trained = self.sum_over_params(lambda weight: weight.bytes * weight.trained)
        return trained <= MAX_UNREDUCED_FRACTION * self.sum_over_params(lambda weight: weight.bytes) / self.ranks


def build_memory_model(task: Workload, sizes: ParallelDims) -> RankMemoryModel:
    """Profile the layers and build the memory model of one rank."""
    step = profile_workload(task, sizes)
    gathered_step = step
    if sizes.grad_avg_size > 1 and task.parallel.all_gather_dtype == "compute":
        gathered_step = profile_workload(task, sizes, as_gathered=True)
    return RankMemoryModel(task, sizes, step, gathered_step)


def estimate_memory(model: RankMemoryModel, machine: ClusterSpec) -> MemoryEstimate:
    """Simulate one step and return the memory of one rank."""
    weights, states, host = model.weights, model.states, model.offloaded_bytes
    if model.is_cpu_offloaded:
        host += weights + states + model.reduced
        weights = states = 0
    process = process_bytes(model, machine)
    components = {"weights": weights, "optimizer": states, "process": process, "auxiliary": model.auxiliary.weights}
    simulation = StepSimulation(model, machine, components)
    simulation.run()
    return MemoryEstimate({name: add_fragmentation(peak, machine) for name, peak in simulation.peaks.items()}, host)


def process_bytes(model: RankMemoryModel, machine: ClusterSpec) -> int:
    """Bytes of a process that are not in tensors."""
    if machine.kind is not None:
        return DRIVER + (COMM_BUFFER_BYTES if machine.devices > 1 else 0)
    has_experts = any(weight.expert for unit in model.step.layers for weight in unit)
    if not has_experts or model.task.compute != torch.bfloat16:
        return PROCESS
    return PROCESS + onednn_cache.CACHE_CAPACITY * onednn_cache.onednn_kernel_bytes()


def add_fragmentation(moment: MemoryPeak, machine: ClusterSpec) -> MemoryPeak:
    """Add the memory that fragmentation wastes on a GPU."""
    if machine.kind is None:
        return moment
    parts = dict(moment.parts)
    parts["process"] += round(FRAGMENTATION * (moment.total - parts["process"]))
    return MemoryPeak(moment.where, parts)


@dataclass
class StepSimulation:
    """Bytes by component at the current point of a simulated step, and the peak of each phase."""

    model: RankMemoryModel
    machine: ClusterSpec
    current: dict[str, int]
    peaks: dict[str, MemoryPeak] = field(default_factory=dict)

    def record(self, phase: str, where: str, kind: str, peak: int, gathered: int = 0) -> None:
        """Record an interval that allocates `peak` bytes of `kind` and `gathered` bytes of weights temporarily."""
        parts = dict(self.current)
        parts[kind] = parts.get(kind, 0) + peak
        parts["gathered"] = parts.get("gathered", 0) + gathered
        moment = MemoryPeak(where, parts)
        if phase not in self.peaks or moment.total > self.peaks[phase].total:
            self.peaks[phase] = moment

    def add(self, kind: str, bytes: int) -> None:
        self.current[kind] = self.current.get(kind, 0) + bytes

    def run(self) -> None:
        """Load the weights, run all micro-batches and the optimizer step, and save."""
        model, task, profile = self.model, self.model.task, self.model.gathered_step
        self.load()
        if cache := task.rollout_cache_bytes(model.sizes):
            self.record("sample", "sampling of answers", "kv_cache", cache)
        if task.auxiliary:
            self.record("forward", "the auxiliary model", "other", model.auxiliary.peak, model.auxiliary.gathered)
        self.run_micro_batch(profile.first, first=True)
        if task.num_micro_batches(model.sizes) > 1:
            self.run_micro_batch(profile.first if model.has_collectives else profile.later, first=False)
        self.record("step", "step of the optimizer", "other", 0 if model.is_cpu_offloaded else model.step.update.peak)
        self.current["gradients"] = 0
        # Each layer is written, read back and compared.
        layer = max(sum(weight.bytes for weight in unit) for unit in model.step.layers)
        self.record("save", "a layer is compared with what was written", "other", layer)

    def load(self) -> None:
        """Load the weights, one full tensor at a time."""
        widening = 8 if self.model.task.quantization.keeps_prequantized else 1  # fp32 instead of 4 bits
        weights = [weight for unit in self.model.units for weight in unit]
        largest = max(w.bytes * (widening if w.name.endswith("quantized_weight") else 1) for w in weights)
        state = self.current.pop("optimizer")
        self.record("load", "reading the largest tensor", "other", largest)
        self.current["optimizer"] = state

    def run_micro_batch(self, step: LayerPass, first: bool) -> None:
        """Run the forward and backward pass of one micro-batch."""
        model, kinds = self.model, self.model.step.kinds
        root = model.gathered(None) + model.auxiliary.gathered_root
        self.record("forward", "embedding", "other", step.before.peak, root)
        self.add("activations", step.before.retained)
        for i, kind in enumerate(kinds):
            peak, gathered = step.layers[kind].peak + self.dequantized(kind), root + model.gathered_layers(i, 1)
            self.record("forward", f"layer {i + 1} of {len(kinds)}", "other", peak, gathered)
            self.add("activations", step.layers[kind].retained)
            if model.task.memory.activation_offloading and i >= OFFLOAD_WINDOW:
                self.add("activations", -step.layers[kinds[i - OFFLOAD_WINDOW]].retained)
        self.run_backward(step, first)

    def run_backward(self, step: LayerPass, first: bool) -> None:
        """Run the backward pass, from the loss to the embedding."""
        model, kinds, root = self.model, self.model.step.kinds, self.model.gathered(None)
        remaining = model.before[-1] if model.has_collectives and not model.task.parallel.reshard_after_forward else 0
        self.record("forward", "loss", "logits", step.head.peak + self.extra_logits(), root + remaining)
        self.add("logits", step.head.retained)
        self.record("backward", "loss", "logits", step.head_back.peak, root + remaining)
        self.add("logits", step.head_back.retained)
        reducing = 0
        for i in reversed(range(len(kinds))):
            kind, layer = kinds[i], step.layers_back[kinds[i]]
            peak, gathered = layer.peak + self.dequantized(kind), root + model.gathered_layers(i, -1) + reducing
            self.record("backward", f"layer {i + 1} of {len(kinds)}", "other", peak, gathered)
            if model.task.memory.activation_offloading and i >= OFFLOAD_WINDOW:  # copied back from the host
                self.add("activations", step.layers[kinds[i - OFFLOAD_WINDOW]].retained)
            self.add_gradients(layer, kind, first)
            reducing = model.reduced_gradient_bytes(kind) if model.has_collectives else 0
        self.record("backward", "embedding", "other", step.before_back.peak, root + reducing)
        self.current["activations"] = self.current["logits"] = 0
        if first:
            self.add("gradients", model.device_gradient_bytes(model.step.root))

    def add_gradients(self, interval: MemoryInterval, kind: int, first: bool) -> None:
        """Update activations and gradients after the backward pass of a layer."""
        model = self.model
        full_gradients = 0 if model.task.memory.optimizer_in_bwd else model.full_gradient_bytes(kind)
        self.add("activations", interval.retained - (full_gradients if first or model.has_collectives else 0))
        if first:
            is_delayed = model.delays_reduction and model.has_collectives
            local_gradients = model.device_gradient_bytes(model.step.layers[kind])
            self.add("gradients", full_gradients if is_delayed else local_gradients)

    def dequantized(self, kind: int) -> int:
        """Bytes of a 4-bit weight that a GPU dequantizes before the matmul."""
        if self.machine.kind is None:
            return 0
        weights = self.model.step.layers[kind]
        sizes = [weight.bytes for weight in weights if weight.name.endswith(".quantized_weight")]
        return 2 * max(sizes, default=0) * self.model.task.compute.itemsize

    def extra_logits(self) -> int:
        """Bytes by which a chunk of logits is larger on a GPU than on the CPU."""
        if self.machine.kind is None:
            return 0
        model, task, vocab = self.model, self.model.task, -(-self.model.task.source.spec.vocab // self.model.sizes.tp)
        is_trained = any(weight.trained and weight.name.startswith(("embed", "head")) for weight in model.step.root)
        row, parts = vocab * task.compute.itemsize, -(-task.tokens(model.sizes) // TOKEN_MULTIPLE)
        max_blocks = {
            device: (1 + is_trained) * bytes // row // TOKEN_MULTIPLE or 1 for device, bytes in CHUNK_BYTES.items()
        }
        sizes = {device: TOKEN_MULTIPLE * -(-parts // -(-parts // count)) * row for device, count in max_blocks.items()}
        return sizes["cuda"] - sizes["cpu"]
