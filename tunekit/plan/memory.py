"""Memory of a rank in each phase of a step, composed from the profile of each kind of layer.

Sharded weights are gathered layer by layer, as in distributed/fsdp.py.
"""

from collections import Counter
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
# Memory outside of tensors: Python and torch on the CPU; CUDA context, kernels and NCCL buffers on a GPU.
CPU_RUNTIME_BYTES, CUDA_CONTEXT_BYTES, COMM_BUFFER_BYTES = 400 * 2**20, 900 * 2**20, 1024 * 2**20
FRAGMENTATION = 0.03  # fraction of the tensor bytes on a GPU that fragmentation wastes


class MemoryPeak(NamedTuple):
    """Highest memory of a phase: where it occurs, and its bytes by component."""

    where: str
    components: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank in each phase, and the host memory that it uses for offloading."""

    phases: dict[str, MemoryPeak]
    host: int = 0

    @property
    def peak(self) -> MemoryPeak:
        return max(self.phases.values(), key=lambda peak: peak.total)

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

    workload: Workload
    dims: ParallelDims
    profile: StepProfile
    gathered_profile: StepProfile  # with weights in the dtype of the all-gather

    @property
    def units(self) -> list[Sequence[ParamSize]]:
        """Parameters of the root (embedding, norm, head), then those of each layer."""
        return [self.profile.root, *(self.profile.layers[kind] for kind in self.profile.kinds)]

    def shard_bytes(self, weight: ParamSize, bytes: int) -> int:
        """Bytes of the local shard of a weight with `bytes` in total. Weights are sharded by rows."""
        rows = weight.shape[0] if weight.shape else 1
        ranks = self.dims.fsdp_size // (self.dims.ep if weight.expert else 1)
        return -(-rows // ranks) * (bytes // rows)

    def sum_over_params(self, bytes: Callable[[ParamSize], int]) -> int:
        """Sum over all weights. Each kind of layer is evaluated once and multiplied by its number of layers."""
        counts = Counter(self.profile.kinds)
        layers = sum(counts[kind] * sum(map(bytes, unit)) for kind, unit in enumerate(self.profile.layers))
        return sum(map(bytes, self.profile.root)) + layers

    @cached_property
    def weights(self) -> int:
        return self.sum_over_params(lambda weight: self.shard_bytes(weight, weight.bytes))

    @cached_property
    def optimizer_states(self) -> int:
        return self.sum_over_params(lambda weight: self.shard_bytes(weight, weight.state))

    @cached_property
    def gradients(self) -> int:
        """Bytes of the gradients that a rank keeps."""
        return sum(map(self.gradient_bytes, self.units))

    def gradient_bytes(self, unit: Sequence[ParamSize]) -> int:
        """Bytes of the local gradient shards of a unit after the reduction."""
        if self.workload.memory.optimizer_in_bwd:
            return 0
        return sum(self.shard_bytes(weight, weight.bytes) for weight in unit if weight.trained)

    def device_gradient_bytes(self, unit: Sequence[ParamSize]) -> int:
        """Bytes of the local gradient shards that stay on the device."""
        return 0 if self.is_cpu_offloaded else self.gradient_bytes(unit)

    @cached_property
    def auxiliary(self) -> "AuxiliaryMemory":
        """Memory of all auxiliary models."""
        weights = gathered = gathered_root = peak = all_gathered = 0
        for model in self.workload.auxiliary_models:
            root, layers, pass_bytes = model.get_memory(self.dims, probe_step(self.workload, self.dims))
            weights += sum(self.shard_bytes(weight, weight.bytes) for unit in (root, *layers) for weight in unit)
            peak = max(peak, pass_bytes + (0 if model.encloses_student else self.max_logits_bytes))
            if self.has_collectives:
                root_bytes, *layer_bytes = (sum(weight.bytes for weight in unit) for unit in (root, *layers))
                gathered = max(gathered, root_bytes + sum(sorted(layer_bytes)[-2:]))
                gathered_root += root_bytes * model.encloses_student
                all_gathered += root_bytes + sum(layer_bytes)
        return AuxiliaryMemory(weights, gathered, gathered_root, peak, all_gathered)

    @property
    def max_logits_bytes(self) -> int:
        """Maximum bytes of a chunk of logits of an auxiliary model."""
        workload = self.workload
        row = workload.source.spec.vocab * workload.compute_dtype.itemsize
        return min(CHUNK_BYTES[workload.device], workload.micro_batch_tokens(self.dims) * row // self.dims.tp)

    @property
    def has_collectives(self) -> bool:
        """Whether weights are gathered and gradients are reduced."""
        return self.dims.grad_avg_size > 1

    @property
    def is_cpu_offloaded(self) -> bool:
        """Whether weight shards are offloaded to the host."""
        return self.has_collectives and self.workload.parallel.cpu_offload

    def all_gathered_bytes(self, kind: int | None) -> int:
        """Bytes of the gathered weights of a kind of layer; None: of the root."""
        return self.full_weight_bytes[kind] if self.has_collectives else 0

    @cached_property
    def full_weight_bytes(self) -> dict[int | None, int]:
        """Bytes of the unsharded weights by kind of layer; None: of the root."""
        units = {None: self.gathered_profile.root, **dict(enumerate(self.gathered_profile.layers))}
        return {kind: sum(weight.bytes for weight in unit) for kind, unit in units.items()}

    @cached_property
    def cumulative_layer_bytes(self) -> list[int]:
        """Bytes of the unsharded weights of the first i layers, for each i."""
        return [0, *accumulate(self.full_weight_bytes[kind] for kind in self.profile.kinds)]

    def full_gradient_bytes(self, kind: int | None) -> int:
        """Bytes of the unsharded gradients of a kind of layer, or of the root, before the reduction."""
        unit = self.gathered_profile.root if kind is None else self.gathered_profile.layers[kind]
        return sum(weight.bytes for weight in unit if weight.trained)

    def reduced_gradient_bytes(self, kind: int | None) -> int:
        """Bytes of the same gradients in the reduction: fp32 if weights are gathered in the compute dtype."""
        is_widened = self.workload.parallel.all_gather_dtype == "compute"
        return self.full_gradient_bytes(kind) * (4 // self.workload.compute_dtype.itemsize if is_widened else 1)

    def all_gathered_layer_bytes(self, i: int, direction: int) -> int:
        """Bytes of the gathered weights of layer i, of prefetched layers, and of earlier ones that stay gathered."""
        if not self.has_collectives:
            return 0
        num_prefetched = max(1, self.workload.parallel.prefetch_layers)
        first, last = (i, i + num_prefetched) if direction > 0 else (i - num_prefetched, i)
        if not self.workload.parallel.reshard_after_forward:
            first = 0
        return (
            self.cumulative_layer_bytes[min(len(self.profile.kinds), last + 1)]
            - self.cumulative_layer_bytes[max(0, first)]
        )

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of activations that a micro-batch offloads to the host."""
        if not self.workload.memory.activation_offloading:
            return 0
        return sum(self.gathered_profile.first.layers[kind].retained for kind in self.profile.kinds[:-OFFLOAD_WINDOW])

    @cached_property
    def delays_reduction(self) -> bool:
        """Whether gradients are reduced only in the last micro-batch of a step, as in distributed/fsdp.py."""
        trained = self.sum_over_params(lambda weight: weight.bytes * weight.trained)
        return (
            trained <= MAX_UNREDUCED_FRACTION * self.sum_over_params(lambda weight: weight.bytes) / self.dims.fsdp_size
        )


def build_memory_model(workload: Workload, dims: ParallelDims) -> RankMemoryModel:
    """Profile the layers and build the memory model of one rank."""
    is_cast = dims.grad_avg_size > 1 and workload.parallel.all_gather_dtype == "compute"
    profile = profile_workload(workload, dims)
    return RankMemoryModel(workload, dims, profile, profile_workload(workload, dims, True) if is_cast else profile)


def estimate_memory(model: RankMemoryModel, cluster: ClusterSpec) -> MemoryEstimate:
    """Simulate one step and return the memory of one rank."""
    weights, states, host = model.weights, model.optimizer_states, model.offloaded_bytes
    if model.is_cpu_offloaded:
        host += weights + states + model.gradients
        weights = states = 0
    components = {"weights": weights, "auxiliary_models": model.auxiliary.weights, "optimizer_states": states}
    simulation = StepSimulation(model, cluster, components | {"runtime": runtime_bytes(model, cluster)})
    simulation.run()
    if cluster.gpu is not None:
        for peak in simulation.peaks.values():
            peak.components["runtime"] += round(FRAGMENTATION * (peak.total - peak.components["runtime"]))
    return MemoryEstimate(simulation.peaks, host)


def runtime_bytes(model: RankMemoryModel, cluster: ClusterSpec) -> int:
    """Bytes of a process outside of tensors: CPU runtime and libraries, or CUDA context and communication buffers."""
    if cluster.gpu is not None:
        return CUDA_CONTEXT_BYTES + (COMM_BUFFER_BYTES if cluster.devices > 1 else 0)
    has_experts = any(weight.expert for unit in model.profile.layers for weight in unit)
    if not has_experts or model.workload.compute_dtype != torch.bfloat16:
        return CPU_RUNTIME_BYTES
    return CPU_RUNTIME_BYTES + onednn_cache.CACHE_CAPACITY * onednn_cache.onednn_kernel_bytes()


@dataclass
class StepSimulation:
    """Bytes by component at the current point of a simulated step, and the peak of each phase."""

    model: RankMemoryModel
    cluster: ClusterSpec
    current: dict[str, int]
    peaks: dict[str, MemoryPeak] = field(default_factory=dict)

    def record(
        self, phase: str, where: str, size: int, all_gathered: int = 0, component: str = "temporary_buffers"
    ) -> None:
        """Record an interval that allocates `size` bytes of a component and `all_gathered` bytes of weights."""
        components = Counter(self.current)
        components[component] += size
        components["all_gathered"] += all_gathered
        peak = MemoryPeak(where, dict(components))
        if phase not in self.peaks or peak.total > self.peaks[phase].total:
            self.peaks[phase] = peak

    def add(self, component: str, bytes: int) -> None:
        self.current[component] = self.current.get(component, 0) + bytes

    def run(self) -> None:
        """Load the weights, run all micro-batches and the optimizer step, and save."""
        model, workload, profile = self.model, self.model.workload, self.model.gathered_profile
        self.load()
        if cache := workload.rollout_cache_bytes(model.dims):
            self.record("rollout", "KV cache", cache, component="kv_cache")
        if workload.auxiliary_models:
            self.record("forward", "auxiliary model", model.auxiliary.peak, model.auxiliary.gathered)
        self.run_micro_batch(profile.first, first=True)
        if workload.num_micro_batches(model.dims) > 1:
            self.run_micro_batch(profile.first if model.has_collectives else profile.later, first=False)
        self.record("optimizer_step", "update", 0 if model.is_cpu_offloaded else model.profile.update.peak)
        self.current["gradients"] = 0
        # Each layer is written, read back and compared.
        layer = max(sum(weight.bytes for weight in unit) for unit in model.profile.layers)
        self.record("save", "verification of a layer", layer)

    def load(self) -> None:
        """Load the weights, one full tensor at a time."""
        widening = 8 if self.model.workload.quantization.keeps_prequantized else 1  # fp32 instead of 4 bits
        weights = [weight for unit in self.model.units for weight in unit]
        largest = max(w.bytes * (widening if w.name.endswith("quantized_weight") else 1) for w in weights)
        state = self.current.pop("optimizer_states")
        self.record("load", "largest tensor", largest)
        self.current["optimizer_states"] = state

    def run_micro_batch(self, step: LayerPass, first: bool) -> None:
        """Run the forward and backward pass of one micro-batch."""
        model, kinds = self.model, self.model.profile.kinds
        root = model.all_gathered_bytes(None) + model.auxiliary.gathered_root
        self.record("forward", "embedding", step.before.peak, root)
        self.add("activations", step.before.retained)
        for i, kind in enumerate(kinds):
            size = step.layers[kind].peak + self.dequantized_bytes(kind)
            all_gathered = root + model.all_gathered_layer_bytes(i, 1)
            self.record("forward", f"layer {i + 1} of {len(kinds)}", size, all_gathered)
            self.add("activations", step.layers[kind].retained)
            if model.workload.memory.activation_offloading and i >= OFFLOAD_WINDOW:
                self.add("activations", -step.layers[kinds[i - OFFLOAD_WINDOW]].retained)
        self.run_backward(step, first)

    def run_backward(self, step: LayerPass, first: bool) -> None:
        """Run the backward pass, from the loss to the embedding."""
        model, kinds, root = self.model, self.model.profile.kinds, self.model.all_gathered_bytes(None)
        stays_gathered = model.has_collectives and not model.workload.parallel.reshard_after_forward
        all_gathered = root + (model.cumulative_layer_bytes[-1] if stays_gathered else 0)
        self.record("forward", "loss", step.head.peak + self.extra_logits_bytes(), all_gathered, "logits")
        self.add("logits", step.head.retained)
        self.record("backward", "loss", step.head_back.peak, all_gathered, "logits")
        self.add("logits", step.head_back.retained)
        reducing = 0
        for i in reversed(range(len(kinds))):
            kind, layer = kinds[i], step.layers_back[kinds[i]]
            all_gathered = root + model.all_gathered_layer_bytes(i, -1) + reducing
            size = layer.peak + self.dequantized_bytes(kind)
            self.record("backward", f"layer {i + 1} of {len(kinds)}", size, all_gathered)
            if model.workload.memory.activation_offloading and i >= OFFLOAD_WINDOW:  # copied back from the host
                self.add("activations", step.layers[kinds[i - OFFLOAD_WINDOW]].retained)
            self.add_gradients(layer, kind, first)
            reducing = model.reduced_gradient_bytes(kind) if model.has_collectives else 0
        self.record("backward", "embedding", step.before_back.peak, root + reducing)
        self.current["activations"] = self.current["logits"] = 0
        if first:
            self.add("gradients", model.device_gradient_bytes(model.profile.root))

    def add_gradients(self, interval: MemoryInterval, kind: int, first: bool) -> None:
        """Update activations and gradients after the backward pass of a layer."""
        model = self.model
        full_gradients = 0 if model.workload.memory.optimizer_in_bwd else model.full_gradient_bytes(kind)
        self.add("activations", interval.retained - (full_gradients if first or model.has_collectives else 0))
        if first:
            is_delayed = model.delays_reduction and model.has_collectives
            local_gradients = model.device_gradient_bytes(model.profile.layers[kind])
            self.add("gradients", full_gradients if is_delayed else local_gradients)

    def dequantized_bytes(self, kind: int) -> int:
        """Bytes of a 4-bit weight that a GPU dequantizes before the matmul."""
        if self.cluster.gpu is None:
            return 0
        weights = self.model.profile.layers[kind]
        quantized_bytes = [weight.bytes for weight in weights if weight.name.endswith(".quantized_weight")]
        return 2 * max(quantized_bytes, default=0) * self.model.workload.compute_dtype.itemsize

    def extra_logits_bytes(self) -> int:
        """Bytes by which a chunk of logits is larger on a GPU than on the CPU."""
        if self.cluster.gpu is None:
            return 0
        workload, dims, root = self.model.workload, self.model.dims, self.model.profile.root
        is_trained = any(weight.trained and weight.name.startswith(("embed", "head")) for weight in root)
        row = -(-workload.source.spec.vocab // dims.tp) * workload.compute_dtype.itemsize
        blocks, chunk_bytes = -(-workload.micro_batch_tokens(dims) // TOKEN_MULTIPLE), {}
        for device, bytes in CHUNK_BYTES.items():
            max_blocks = (1 + is_trained) * bytes // row // TOKEN_MULTIPLE or 1
            chunk_bytes[device] = TOKEN_MULTIPLE * -(-blocks // -(-blocks // max_blocks)) * row
        return chunk_bytes["cuda"] - chunk_bytes["cpu"]
