"""FLOPs, communication volume and time of a step on one rank, from the data sheet rates of the hardware.

Collectives are counted as ring algorithms: each of N ranks sends (N - 1) / N of the bytes in an all-gather or
reduce-scatter, and twice that in an all-reduce.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.models.decoder import Decoder
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.spec import Attention, DecoderSpec, DeltaNet, DenseMoE, LatentAttention, Layer, MoE
from tunekit.plan.auxiliary_models import AuxiliaryModel
from tunekit.plan.hardware import CALL_SECONDS, HOST_BANDWIDTH, LAUNCH_SECONDS, ClusterSpec
from tunekit.plan.memory import RankMemoryModel
from tunekit.plan.memory_tracker import Operations
from tunekit.quantization.config import NoQuantization

AUXILIARY_FLOPS: dict[tuple[DecoderSpec, int], float] = {}
FLASH_BACK = 2.5  # FLOPs of the backward pass of attention relative to the forward pass; scores are recomputed


@dataclass(frozen=True)
class CommVolume:
    """Bytes that a rank sends in a step, by collective and tensors."""

    collective: str
    tensors: str
    bytes: int
    ranks: int
    stride: int  # difference between neighboring ranks
    overlapped: bool  # whether it overlaps with computation


@dataclass(frozen=True)
class StepTime:
    """FLOPs, communication volumes and seconds of one step on a rank. Seconds are None if the speed is unknown."""

    flops: float
    comm_volumes: tuple[CommVolume, ...]
    compute: float | None  # seconds of matmuls and attention
    overlapped_comm: float = 0.0  # seconds of communication that overlaps with computation
    exposed_comm: float = 0.0  # seconds of communication that does not overlap
    host_copies: float = 0.0  # seconds of copies to and from host memory, which overlap
    optimizer: float = 0.0  # seconds of the optimizer step
    num_launches: int = 0  # kernels that the CPU launches
    launches: float = 0.0  # seconds of the launches, in parallel to the GPU

    @property
    def seconds(self) -> float | None:
        """Maximum of the time of the GPU and of the launches of the CPU, which runs asynchronously."""
        if self.compute is None:
            return None
        device = max(self.compute, self.overlapped_comm, self.host_copies) + self.exposed_comm + self.optimizer
        return max(device, self.launches)


def estimate_step_time(model: RankMemoryModel, decoder: Decoder, cluster: ClusterSpec) -> StepTime:
    """Estimate the time of one step. `decoder` is the model of a rank on the meta device."""
    flops = count_flops(model, decoder)
    comm_volumes = tuple(volume for volume in list_comm_volumes(model) if volume.bytes and volume.ranks > 1)
    if cluster.gpu is None:
        return StepTime(flops, comm_volumes, None)
    comm = {True: 0.0, False: 0.0}
    for volume in comm_volumes:
        comm[volume.overlapped] += volume.bytes / cluster.bandwidth(volume.ranks, volume.stride)
    operations = count_operations(model)
    bandwidth = HOST_BANDWIDTH if model.is_cpu_offloaded else cluster.gpu.memory_bandwidth  # limits the optimizer step
    optimizer_bytes = 2 * (model.weights + model.optimizer_states) + model.gradients
    return StepTime(
        flops,
        comm_volumes,
        compute=flops / (cluster.gpu.rate(model.workload.precision.compute_dtype) * 1e12 * cluster.mfu),
        overlapped_comm=comm[True],
        exposed_comm=comm[False],
        host_copies=host_copy_bytes(model) / (1e9 * HOST_BANDWIDTH),
        optimizer=optimizer_bytes / (1e9 * bandwidth),
        num_launches=operations.launches,
        launches=LAUNCH_SECONDS * operations.launches + CALL_SECONDS * operations.calls,
    )


def count_operations(model: RankMemoryModel) -> Operations:
    """Operations that the CPU launches in a step, without collectives and auxiliary models."""
    profile, total = model.profile, Operations()
    num_micro_batches = model.workload.num_micro_batches(model.dims)
    for micro_batch, times in ((profile.first, 1), (profile.later, num_micro_batches - 1)):
        for interval in (micro_batch.before, micro_batch.head, micro_batch.head_back, micro_batch.before_back):
            total = total.plus(interval.operations, times)
        for kind in profile.kinds:
            for interval in (micro_batch.layers[kind], micro_batch.layers_back[kind]):
                total = total.plus(layer_operations(model, interval.operations), times)
    for kind in profile.kinds:
        forward = layer_operations(model, profile.first.layers[kind].operations)
        total = total.plus(forward, num_micro_batches * model.workload.num_reference_passes)
    # The profile has one layer of each kind; operations of the optimizer scale with the number of trained weights.
    units = ([profile.root, *profile.layers], model.units)
    profiled, trained = (sum(weight.trained for unit in group for weight in unit) for group in units)
    return total.plus(profile.update.operations, trained / max(1, profiled))


def layer_operations(model: RankMemoryModel, layer: Operations) -> Operations:
    """Operations of a layer. A compiled layer has one fused kernel per matmul and no Python operations."""
    return Operations(2 * layer.matmuls, 0, layer.matmuls) if model.workload.compile else layer


def host_copy_bytes(model: RankMemoryModel) -> int:
    """Bytes copied between GPU and host memory in a step: activations both ways, weights for each all-gather."""
    num_micro_batches = model.workload.num_micro_batches(model.dims)
    activations = 2 * num_micro_batches * model.offloaded_bytes
    if not model.is_cpu_offloaded:
        return activations
    num_gathers = 2 if model.workload.parallel.reshard_after_forward else 1
    return activations + num_gathers * num_micro_batches * model.weights + model.gradients


# FLOPs


def count_flops(model: RankMemoryModel, decoder: Decoder) -> float:
    """FLOPs of a rank in a step, including recomputation; a multiply-add counts as two."""
    workload, dims, flops_of_kind = model.workload, model.dims, {}
    tokens = workload.micro_batch_tokens(dims) * workload.num_micro_batches(dims)
    num_recomputed = {"none": 0, "full": 1, "selective": 0}[workload.memory.activation_checkpointing]
    total = 0.0
    for kind, layer, spec in zip(model.profile.kinds, decoder.layers, decoder.spec.layers, strict=True):
        if kind not in flops_of_kind:
            flops_of_kind[kind] = linear_flops(layer, num_active_experts(spec))
        forward, back = flops_of_kind[kind]
        # Context parallel ranks have tokens from both ends of a row: equal work. TP does not shard recurrent mixers.
        heads = dims.tp if isinstance(spec.mixer, Attention | LatentAttention) else 1
        pairs = attention_flops(spec, workload.max_length) / heads
        total += (1 + workload.num_reference_passes + num_recomputed) * (forward + pairs) + back + FLASH_BACK * pairs
    head = 2.0 * decoder.head.in_features * decoder.head.out_features
    total += sum(auxiliary_flops(auxiliary, workload.max_length) for auxiliary in workload.auxiliary_models) / dims.tp
    return tokens * (total + head * (workload.num_reference_passes + (3 if decoder.head.weight.requires_grad else 2)))


def auxiliary_flops(model: AuxiliaryModel, length: int) -> float:
    """Forward FLOPs of an auxiliary model per token."""
    key = model.source.spec, length
    if key not in AUXILIARY_FLOPS:
        decoder = build.build_meta_model(model.source, NoQuantization(), FrozenModel())
        pairs = zip(decoder.layers, decoder.spec.layers, strict=True)
        total = sum(
            linear_flops(layer, num_active_experts(spec))[0] + attention_flops(spec, length) for layer, spec in pairs
        )
        AUXILIARY_FLOPS[key] = total + 2.0 * decoder.head.in_features * decoder.head.out_features
    return AUXILIARY_FLOPS[key]


def linear_flops(model: nn.Module, num_experts: int) -> tuple[float, float]:
    """Forward and backward FLOPs per token of the linear layers of a model with `num_experts` active experts."""
    forward = back = 0.0
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            size = 2.0 * module.in_features * module.out_features
            size *= num_experts if isinstance(module, GroupedLinear) else 1
            forward += size
            trained = (name for name, p in module.named_parameters(recurse=False) if p.requires_grad)
            back += size * (2 if "weight" in trained else 1)
    return forward, back


def num_active_experts(spec: Layer) -> int:
    """Number of active experts per token; 1 for a dense layer."""
    ffn = spec.ffn.sparse if isinstance(spec.ffn, DenseMoE) else spec.ffn
    return ffn.top_k if isinstance(ffn, MoE) else 1


def attention_flops(spec: Layer, length: int) -> float:
    """FLOPs of scores and values per token, averaged over a row."""
    mixer = spec.mixer
    if isinstance(mixer, Attention):
        seen = min(length / 2, mixer.window or length, (mixer.chunk or length) / 2)
        return 4.0 * mixer.heads * mixer.head_dim * seen
    if isinstance(mixer, LatentAttention):
        return 2.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim) * length / 2
    return 4.0 * mixer.v_heads * mixer.k_dim * mixer.v_dim if isinstance(mixer, DeltaNet) else 0.0


# Communication


def list_comm_volumes(model: RankMemoryModel) -> Iterator[CommVolume]:
    """Bytes that a rank sends in a step, by type of parallelism."""
    workload, (tp, cp, ep) = model.workload, (model.dims.tp, model.dims.cp, model.dims.ep)
    yield from list_data_parallel_volumes(model)
    layers = workload.source.spec.layers
    num_tokens = workload.micro_batch_tokens(model.dims) * workload.num_micro_batches(model.dims)
    hidden_bytes = num_tokens * workload.source.spec.dim * workload.compute_dtype.itemsize
    num_passes = 3 if workload.memory.activation_checkpointing == "full" else 2  # forward, backward, recomputation
    # After the mixer and after the feed-forward layer, in the forward and in the backward pass.
    size = round(2 * num_passes * len(layers) * hidden_bytes * 2 * (tp - 1) / tp)
    yield CommVolume("all-gather and reduce-scatter", "activations (TP)", size, tp, 1, False)
    kv_bytes = sum(map(kv_width, layers)) // tp * num_tokens * workload.compute_dtype.itemsize * (cp - 1)
    yield CommVolume("all-gather", "keys and values (CP)", (num_passes - 1) * kv_bytes, cp, tp, False)
    yield CommVolume("reduce-scatter", "gradients of keys and values (CP)", kv_bytes, cp, tp, False)
    num_experts = sum(num_active_experts(layer) for layer in layers if isinstance(layer.ffn, MoE | DenseMoE))
    size = round(2 * num_passes * num_experts * hidden_bytes * (ep - 1) / ep)
    yield CommVolume("all-to-all", "tokens to experts and back (EP)", size, ep, tp, False)


def list_data_parallel_volumes(model: RankMemoryModel) -> Iterator[CommVolume]:
    """Bytes that FSDP and replicas send."""
    dims, kinds, num_micro_batches = model.dims, model.profile.kinds, model.workload.num_micro_batches(model.dims)
    ranks, replicas, stride = dims.fsdp_size, dims.dp_replicate, dims.tp
    fraction = (ranks - 1) / ranks
    layers, root = sum(map(model.all_gathered_bytes, kinds)), model.all_gathered_bytes(None)
    regathered = layers if model.workload.parallel.reshard_after_forward else 0
    gradients = sum(map(model.reduced_gradient_bytes, (None, *kinds)))
    gradients *= 1 if model.delays_reduction else num_micro_batches
    for tensors, size in (
        ("weights, forward", layers + root),
        ("weights, backward", regathered),
        ("weights of auxiliary models", model.auxiliary.all_gathered),
    ):
        yield CommVolume("all-gather", tensors, round(num_micro_batches * size * fraction), ranks, stride, True)
    yield CommVolume("reduce-scatter", "gradients", round(gradients * fraction), ranks, stride, True)
    size = round(gradients / ranks * 2 * (replicas - 1) / replicas)
    yield CommVolume("all-reduce", "gradients (replicas)", size, replicas, stride * ranks, True)


def kv_width(layer: Layer) -> int:
    """Number of elements of the keys and values of a token."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        return 2 * mixer.kv_heads * mixer.head_dim if mixer.kv_shared_layer is None else 0
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
    return 0
