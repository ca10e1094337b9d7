"""What a rank computes and sends in a step, and how long both take at the speed that makers tell.

Collectives are counted as rings send them: of N ranks each sends (N - 1) / N of what is gathered or scattered, and
twice that of what is added up for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.models.decoder import Block, Decoder
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.spec import Attention, DecoderSpec, DeltaNet, DenseMoE, LatentAttention, Layer, MoE
from tunekit.plan.auxiliary_models import AuxiliaryModel
from tunekit.plan.hardware import CALL, HOST, LAUNCH, ClusterSpec
from tunekit.plan.layer_profile import LayerPass
from tunekit.plan.memory import RankMemoryModel, offloaded_bytes
from tunekit.plan.operations import Operations
from tunekit.quantization.config import NoQuantization

ASKED: dict[tuple[DecoderSpec, int], float] = {}
FLASH_BACK = 2.5  # products of attention's backward pass, as a multiple of those forward: scores are made again


@dataclass(frozen=True)
class CommVolume:
    """Bytes that a rank sends in a step."""

    kind: str
    what: str
    bytes: int
    ranks: int
    stride: int  # places between neighbours
    hidden: bool  # whether it goes on beside products


@dataclass(frozen=True)
class StepTime:
    """A step: products and sums of a rank, what it sends, and seconds, where the speed is known."""

    flops: float
    flows: tuple[CommVolume, ...]
    computing: float | None
    hidden: float = 0.0  # seconds of what is sent beside products
    waiting: float = 0.0  # and of what all wait for
    hosted: float = 0.0  # of what goes to the host and back beside products
    moving: float = 0.0  # of the optimizer
    launches: int = 0  # kernels that the host starts
    launching: float = 0.0  # seconds that it takes for them, while the device computes

    @property
    def seconds(self) -> float | None:
        """The larger of the time of the device and that of the host, which runs ahead of it."""
        if self.computing is None:
            return None
        device = max(self.computing, self.hidden, self.hosted) + self.waiting + self.moving
        return max(device, self.launching)


def estimate_step_time(books: RankMemoryModel, net: Decoder, machine: ClusterSpec) -> StepTime:
    """How one step goes; `net` is the model of a rank, on no device."""
    flops = work(books, net)
    flows = tuple(flow for flow in sent(books) if flow.bytes and flow.ranks > 1)
    if machine.kind is None:
        return StepTime(flops, flows, None)
    times = {flow: flow.bytes / machine.bandwidth(flow.ranks, flow.stride) for flow in flows}
    hidden = sum(time for flow, time in times.items() if flow.hidden)
    waiting = sum(time for flow, time in times.items() if not flow.hidden)
    computing = flops / (machine.kind.rate(books.task.precision.compute_dtype) * 1e12 * machine.reached)
    hosted = to_host(books) / (1e9 * HOST)
    done = operations(books)
    launching = LAUNCH * done.launches + CALL * done.calls
    moving = moved(books, machine.kind.memory)
    return StepTime(flops, flows, computing, hidden, waiting, hosted, moving, done.launches, launching)


def operations(books: RankMemoryModel) -> Operations:
    """The operations that the host launches in a step, without those of collectives and of models that are asked."""
    task, step, passes = books.task, books.step, books.task.parts(books.sizes)
    total = passed(books, step.first).plus(passed(books, step.later), passes - 1)
    forward = Operations()
    for kind in step.kinds:
        forward = forward.plus(fused(books, step.first.layers[kind].operations))
    total = total.plus(forward, passes * task.asks)
    # The optimizer's are in proportion to the weights: of the layers that were measured, and of all.
    units = [step.root, *step.layers]
    measured, every = (sum(weight.trained for unit in some for weight in unit) for some in (units, books.units))
    return total.plus(step.update.operations, every / max(1, measured))


def passed(books: RankMemoryModel, step: LayerPass) -> Operations:
    """The operations of one micro-batch."""
    total = Operations()
    for stretch in (step.before, step.head, step.head_back, step.before_back):
        total = total.plus(stretch.operations)
    for kind in books.step.kinds:
        for stretch in (step.layers[kind], step.layers_back[kind]):
            total = total.plus(fused(books, stretch.operations))
    return total


def fused(books: RankMemoryModel, layer: Operations) -> Operations:
    """The operations of a layer; compiled, one fused kernel follows each matmul, and nothing runs in Python."""
    return Operations(2 * layer.matmuls, 0, layer.matmuls) if books.task.compile else layer


def to_host(books: RankMemoryModel) -> int:
    """Bytes between a device and its host in a step: activations there and back, weights for each gathering."""
    passes = books.task.parts(books.sizes)
    away = 2 * passes * offloaded_bytes(books)
    if not books.hosted:
        return away
    rounds = 2 if books.task.parallel.reshard_after_forward else 1
    return away + rounds * passes * books.weights + books.reduced


def moved(books: RankMemoryModel, memory: float) -> float:
    """Seconds for what a step of the optimizer reads and writes, on the host if it waits there."""
    return (2 * (books.weights + books.states) + books.reduced) / (1e9 * (HOST if books.hosted else memory))


# Products


def work(books: RankMemoryModel, net: Decoder) -> float:
    """Products and sums of a rank in a step, twice the products: of what is done again too."""
    task, sizes, known = books.task, books.sizes, {}
    tokens = task.tokens(sizes) * task.parts(sizes)
    again = {"none": 0, "full": 1, "selective": 0}[task.memory.activation_checkpointing]
    total = 0.0
    for kind, layer, spec in zip(books.step.kinds, net.layers, net.spec.layers, strict=True):
        if kind not in known:
            known[kind] = products(layer, active(spec))
        forward, back = known[kind]
        # Of a row that ranks share, each has tokens from both ends. What has a state is made by each in whole.
        heads = 1 if isinstance(spec.mixer, DeltaNet) else sizes.tp
        pairs = attention(spec, task.max_length) / heads
        total += (1 + task.asks + again) * (forward + pairs) + back + FLASH_BACK * pairs
    head = 2.0 * net.head.in_features * net.head.out_features
    total += sum(asked(second, task.max_length) for second in task.beside) / sizes.tp
    return tokens * (total + head * (task.asks + (3 if net.head.weight.requires_grad else 2)))


def asked(second: AuxiliaryModel, length: int) -> float:
    """Of a token in a model that is asked."""
    key = second.source.spec, length
    if key not in ASKED:
        net = build.build_meta_model(second.source, NoQuantization(), FrozenModel())
        pairs = zip(net.layers, net.spec.layers, strict=True)
        total = sum(products(layer, active(spec))[0] + attention(spec, length) for layer, spec in pairs)
        ASKED[key] = total + 2.0 * net.head.in_features * net.head.out_features
    return ASKED[key]


def products(layer: Block, share: int) -> tuple[float, float]:
    """Of a token in the linear layers of a block, forward and back; it goes through `share` experts."""
    forward = back = 0.0
    for module in layer.modules():
        if isinstance(module, Linear | GroupedLinear):
            size = 2.0 * module.in_features * module.out_features
            size *= share if isinstance(module, GroupedLinear) else 1
            forward += size
            back += size * (2 if learnt(module) else 1)
    return forward, back


def learnt(module: nn.Module) -> bool:
    """Whether a linear layer has a gradient of its weight."""
    return any(p.requires_grad and name == "weight" for name, p in module.named_parameters(recurse=False))


def active(spec: Layer) -> int:
    """How many experts a token goes through."""
    ffn = spec.ffn.sparse if isinstance(spec.ffn, DenseMoE) else spec.ffn
    return ffn.top_k if isinstance(ffn, MoE) else 1


def attention(spec: Layer, length: int) -> float:
    """Products of scores and values of a token, on average over a row."""
    mixer = spec.mixer
    if isinstance(mixer, Attention):
        seen = min(length / 2, mixer.window or length, (mixer.chunk or length) / 2)
        return 4.0 * mixer.heads * mixer.head_dim * seen
    if isinstance(mixer, LatentAttention):
        return 2.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim) * length / 2
    return 4.0 * mixer.v_heads * mixer.k_dim * mixer.v_dim


# Exchanges


def sent(books: RankMemoryModel) -> Iterator[CommVolume]:
    """What a rank sends in a step, by each choice of how ranks share."""
    task, sizes = books.task, books.sizes
    passes = task.parts(sizes)
    yield from sharded(books, passes)
    width = task.tokens(sizes) * task.source.spec.dim * task.compute.itemsize * passes
    layers = task.source.spec.layers
    again = 3 if task.memory.activation_checkpointing == "full" else 2  # forward, back, and forward again
    tensor, context, expert = sizes.tp, sizes.cp, sizes.ep
    # Behind the mixer and behind the feed-forward part, and once more for each on the way back.
    bytes = round(2 * again * len(layers) * width * 2 * (tensor - 1) / tensor)
    yield CommVolume("gather and scatter", "tokens, tensor parallel", bytes, tensor, 1, False)
    keys = sum(wide(layer) for layer in layers) // tensor * task.tokens(sizes) * task.compute.itemsize * passes
    yield CommVolume("all-gather", "keys and values, context", (again - 1) * keys * (context - 1), context, tensor,
               False)  # fmt: skip
    yield CommVolume("reduce-scatter", "gradients of keys, context", keys * (context - 1), context, tensor, False)
    chosen = sum(active(layer) for layer in layers if isinstance(layer.ffn, MoE | DenseMoE))
    bytes = round(2 * again * chosen * width * (expert - 1) / expert)
    yield CommVolume("all-to-all", "tokens to experts and back", bytes, expert, tensor, False)


def sharded(books: RankMemoryModel, passes: int) -> Iterator[CommVolume]:
    """Of FSDP and of copies."""
    sizes, parallel, kinds = books.sizes, books.task.parallel, books.step.kinds
    ranks, stride = sizes.fsdp_size, sizes.tp
    blocks, root = sum(books.gathered(kind) for kind in kinds), books.gathered(None)
    part = (ranks - 1) / ranks
    back = blocks if parallel.reshard_after_forward else 0
    rounds = 1 if books.waits else passes
    gradients = sum(map(books.exchanged, (None, *kinds)))
    yield CommVolume("all-gather", "weights, forward", round(passes * (blocks + root) * part), ranks, stride, True)
    yield CommVolume("all-gather", "weights, backward", round(passes * back * part), ranks, stride, True)
    asked = round(passes * books.others.every * part)
    yield CommVolume("all-gather", "weights of the other model", asked, ranks, stride, True)
    yield CommVolume("reduce-scatter", "gradients", round(rounds * gradients * part), ranks, stride, True)
    copies = sizes.dp_replicate
    bytes = round(rounds * gradients / ranks * 2 * (copies - 1) / copies)
    yield CommVolume("all-reduce", "gradients of copies", bytes, copies, stride * ranks, True)


def wide(layer: Layer) -> int:
    """Numbers of the keys and values of a token."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        return 2 * mixer.kv_heads * mixer.head_dim if mixer.kv_shared_layer is None else 0
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
    return 0
