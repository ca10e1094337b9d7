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
from tunekit.plan.operations import Operations
from tunekit.quantization.config import NoQuantization

AUXILIARY_FLOPS: dict[tuple[DecoderSpec, int], float] = {}
FLASH_BACK = 2.5  # FLOPs of the backward pass of attention relative to the forward pass; scores are recomputed


@dataclass(frozen=True)
class CommVolume:
    """Bytes that a rank sends in a step."""

    kind: str
    tensors: str
    bytes: int
    ranks: int
    stride: int  # difference between neighboring ranks
    hidden: bool  # whether it overlaps with computation


@dataclass(frozen=True)
class StepTime:
    """FLOPs, communication volumes and seconds of one step on a rank. Seconds are None if the speed is unknown."""

    flops: float
    comm_volumes: tuple[CommVolume, ...]
    compute: float | None
    hidden: float = 0.0  # seconds of communication that overlaps with computation
    exposed_comm: float = 0.0  # seconds of communication that does not overlap
    host_transfer: float = 0.0  # seconds of copies to and from the host, which overlap
    optimizer: float = 0.0  # seconds of the optimizer step
    launches: int = 0  # kernels that the host launches
    launch: float = 0.0  # seconds of the launches, in parallel to the device

    @property
    def seconds(self) -> float | None:
        """Maximum of the device time and of the launch time of the host, which runs asynchronously."""
        if self.compute is None:
            return None
        device = max(self.compute, self.hidden, self.host_transfer) + self.exposed_comm + self.optimizer
        return max(device, self.launch)


def estimate_step_time(memory_model: RankMemoryModel, net: Decoder, machine: ClusterSpec) -> StepTime:
    """Estimate the time of one step. `net` is the model of a rank on the meta device."""
    flops = count_flops(memory_model, net)
    comm_volumes = tuple(flow for flow in list_comm_volumes(memory_model) if flow.bytes and flow.ranks > 1)
    if machine.kind is None:
        return StepTime(flops, comm_volumes, None)
    times = {flow: flow.bytes / machine.bandwidth(flow.ranks, flow.stride) for flow in comm_volumes}
    hidden = sum(time for flow, time in times.items() if flow.hidden)
    exposed_comm = sum(time for flow, time in times.items() if not flow.hidden)
    compute = flops / (machine.kind.rate(memory_model.task.precision.compute_dtype) * 1e12 * machine.mfu)
    host_transfer = host_transfer_bytes(memory_model) / (1e9 * HOST_BANDWIDTH)
    done = operations(memory_model)
    launch = LAUNCH_SECONDS * done.launches + CALL_SECONDS * done.calls
    optimizer = optimizer_seconds(memory_model, machine.kind.memory)
    return StepTime(flops, comm_volumes, compute, hidden, exposed_comm, host_transfer, optimizer, done.launches, launch)


def operations(memory_model: RankMemoryModel) -> Operations:
    """Operations that the host launches in a step, without collectives and auxiliary models."""
    task, step, total = memory_model.task, memory_model.step, Operations()
    passes = task.num_micro_batches(memory_model.sizes)
    for micro_batch, times in ((step.first, 1), (step.later, passes - 1)):
        for interval in (micro_batch.before, micro_batch.head, micro_batch.head_back, micro_batch.before_back):
            total = total.plus(interval.operations, times)
        for kind in step.kinds:
            for interval in (micro_batch.layers[kind], micro_batch.layers_back[kind]):
                total = total.plus(layer_operations(memory_model, interval.operations), times)
    for kind in step.kinds:
        forward = layer_operations(memory_model, step.first.layers[kind].operations)
        total = total.plus(forward, passes * task.num_reference_passes)
    # The profile has one layer of each kind; operations of the optimizer scale with the number of trained weights.
    units = [step.root, *step.layers]
    profiled_trained, total_trained = (
        sum(weight.trained for unit in group for weight in unit) for group in (units, memory_model.units)
    )
    return total.plus(step.update.operations, total_trained / max(1, profiled_trained))


def layer_operations(memory_model: RankMemoryModel, layer: Operations) -> Operations:
    """Operations of a layer. A compiled layer has one fused kernel per matmul and no Python operations."""
    return Operations(2 * layer.matmuls, 0, layer.matmuls) if memory_model.task.compile else layer


def host_transfer_bytes(memory_model: RankMemoryModel) -> int:
    """Bytes copied between device and host in a step: activations both ways, weights for each all-gather."""
    passes = memory_model.task.num_micro_batches(memory_model.sizes)
    away = 2 * passes * memory_model.offloaded_bytes
    if not memory_model.is_cpu_offloaded:
        return away
    rounds = 2 if memory_model.task.parallel.reshard_after_forward else 1
    return away + rounds * passes * memory_model.weights + memory_model.reduced


def optimizer_seconds(memory_model: RankMemoryModel, memory: float) -> float:
    """Seconds of the optimizer step, which is limited by memory bandwidth; on the host if offloaded."""
    return (2 * (memory_model.weights + memory_model.states) + memory_model.reduced) / (
        1e9 * (HOST_BANDWIDTH if memory_model.is_cpu_offloaded else memory)
    )


# FLOPs


def count_flops(memory_model: RankMemoryModel, net: Decoder) -> float:
    """FLOPs of a rank in a step, including recomputation; a multiply-add counts as two."""
    task, sizes, flops_of_kind = memory_model.task, memory_model.sizes, {}
    tokens = task.tokens(sizes) * task.num_micro_batches(sizes)
    num_recomputed = {"none": 0, "full": 1, "selective": 0}[task.memory.activation_checkpointing]
    total = 0.0
    for kind, layer, spec in zip(memory_model.step.kinds, net.layers, net.spec.layers, strict=True):
        if kind not in flops_of_kind:
            flops_of_kind[kind] = linear_flops(layer, num_active_experts(spec))
        forward, back = flops_of_kind[kind]
        # Context parallel ranks have tokens from both ends of a row: equal work. TP does not shard recurrent mixers.
        heads = sizes.tp if isinstance(spec.mixer, Attention | LatentAttention) else 1
        pairs = attention(spec, task.max_length) / heads
        total += (1 + task.num_reference_passes + num_recomputed) * (forward + pairs) + back + FLASH_BACK * pairs
    head = 2.0 * net.head.in_features * net.head.out_features
    total += sum(auxiliary_flops(model, task.max_length) for model in task.auxiliary) / sizes.tp
    return tokens * (total + head * (task.num_reference_passes + (3 if net.head.weight.requires_grad else 2)))


def auxiliary_flops(model: AuxiliaryModel, length: int) -> float:
    """Forward FLOPs of an auxiliary model per token."""
    key = model.source.spec, length
    if key not in AUXILIARY_FLOPS:
        net = build.build_meta_model(model.source, NoQuantization(), FrozenModel())
        pairs = zip(net.layers, net.spec.layers, strict=True)
        total = sum(linear_flops(layer, num_active_experts(spec))[0] + attention(spec, length) for layer, spec in pairs)
        AUXILIARY_FLOPS[key] = total + 2.0 * net.head.in_features * net.head.out_features
    return AUXILIARY_FLOPS[key]


def linear_flops(model: nn.Module, num_experts: int) -> tuple[float, float]:
    """Forward and backward FLOPs per token of the linear layers of a model with `num_experts` active experts."""
    forward = back = 0.0
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            size = 2.0 * module.in_features * module.out_features
            size *= num_experts if isinstance(module, GroupedLinear) else 1
            forward += size
            back += size * (2 if has_weight_gradient(module) else 1)
    return forward, back


def has_weight_gradient(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is trained."""
    return any(p.requires_grad and name == "weight" for name, p in module.named_parameters(recurse=False))


def num_active_experts(spec: Layer) -> int:
    """Number of active experts per token; 1 for a dense layer."""
    ffn = spec.ffn.sparse if isinstance(spec.ffn, DenseMoE) else spec.ffn
    return ffn.top_k if isinstance(ffn, MoE) else 1


def attention(spec: Layer, length: int) -> float:
    """FLOPs of scores and values per token, averaged over a row."""
    mixer = spec.mixer
    if isinstance(mixer, Attention):
        seen = min(length / 2, mixer.window or length, (mixer.chunk or length) / 2)
        return 4.0 * mixer.heads * mixer.head_dim * seen
    if isinstance(mixer, LatentAttention):
        return 2.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim) * length / 2
    return 4.0 * mixer.v_heads * mixer.k_dim * mixer.v_dim if isinstance(mixer, DeltaNet) else 0.0


# Communication


def list_comm_volumes(memory_model: RankMemoryModel) -> Iterator[CommVolume]:
    """Bytes that a rank sends in a step, by type of parallelism."""
    task, sizes = memory_model.task, memory_model.sizes
    passes = task.num_micro_batches(sizes)
    yield from list_fsdp_volumes(memory_model, passes)
    width = task.tokens(sizes) * task.source.spec.dim * task.compute.itemsize * passes
    layers = task.source.spec.layers
    num_passes = 3 if task.memory.activation_checkpointing == "full" else 2  # forward, backward, recomputation
    tensor, context, expert = sizes.tp, sizes.cp, sizes.ep
    # After the mixer and after the feed-forward layer, in the forward and in the backward pass.
    bytes = round(2 * num_passes * len(layers) * width * 2 * (tensor - 1) / tensor)
    yield CommVolume("gather and scatter", "tokens, tensor parallel", bytes, tensor, 1, False)
    keys = sum(kv_width(layer) for layer in layers) // tensor * task.tokens(sizes) * task.compute.itemsize * passes
    yield CommVolume("all-gather", "keys and values, context", (num_passes - 1) * keys * (context - 1), context, tensor,
               False)  # fmt: skip
    yield CommVolume("reduce-scatter", "gradients of keys, context", keys * (context - 1), context, tensor, False)
    chosen = sum(num_active_experts(layer) for layer in layers if isinstance(layer.ffn, MoE | DenseMoE))
    bytes = round(2 * num_passes * chosen * width * (expert - 1) / expert)
    yield CommVolume("all-to-all", "tokens to experts and back", bytes, expert, tensor, False)


def list_fsdp_volumes(memory_model: RankMemoryModel, passes: int) -> Iterator[CommVolume]:
    """Bytes that FSDP and replication send."""
    sizes, parallel, kinds = memory_model.sizes, memory_model.task.parallel, memory_model.step.kinds
    ranks, stride = sizes.fsdp_size, sizes.tp
    blocks, root = sum(memory_model.gathered(kind) for kind in kinds), memory_model.gathered(None)
    fraction = (ranks - 1) / ranks
    back = blocks if parallel.reshard_after_forward else 0
    rounds = 1 if memory_model.delays_reduction else passes
    gradients = sum(map(memory_model.reduced_gradient_bytes, (None, *kinds)))
    yield CommVolume("all-gather", "weights, forward", round(passes * (blocks + root) * fraction), ranks, stride, True)
    yield CommVolume("all-gather", "weights, backward", round(passes * back * fraction), ranks, stride, True)
    auxiliary = round(passes * memory_model.auxiliary.all_gathered * fraction)
    yield CommVolume("all-gather", "weights of the other model", auxiliary, ranks, stride, True)
    yield CommVolume("reduce-scatter", "gradients", round(rounds * gradients * fraction), ranks, stride, True)
    copies = sizes.dp_replicate
    bytes = round(rounds * gradients / ranks * 2 * (copies - 1) / copies)
    yield CommVolume("all-reduce", "gradients of copies", bytes, copies, stride * ranks, True)


def kv_width(layer: Layer) -> int:
    """Number of elements of the keys and values of a token."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        return 2 * mixer.kv_heads * mixer.head_dim if mixer.kv_shared_layer is None else 0
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
    return 0
