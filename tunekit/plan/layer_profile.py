"""What one layer of each kind needs, measured on shapes alone: the step of the recipe runs, and nothing is computed.

A model of one layer of each kind takes two micro-batches and a step of its optimizer, on tensors that hold no numbers.
So whatever the layers, an adapter, a format, recompute or an optimizer keep is counted where they keep it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tunekit.adapters.config import NoAdapter
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.kernels import fake_mode
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Block, Decoder
from tunekit.models.moe import Experts
from tunekit.optim.train_optimizer import TrainOptimizer
from tunekit.plan.memory_tracker import MemoryTracker
from tunekit.plan.operations import Operations

CPU = torch.device("cpu")
WARMUP_TOKENS = 64  # tokens of the row for which an optimizer makes its state


class LossFn(Protocol):
    def __call__(self, model: Decoder, batch: Batch) -> Tensor: ...


class OptimizerFactory(Protocol):
    def build(self, trained: Any, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer: ...


class ProbeStep(NamedTuple):
    """What a recipe does with a model: all that decides what a step keeps."""

    adapter: NoAdapter
    memory: MemoryConfig
    optimizer: OptimizerFactory
    loss: LossFn
    clip: float
    rows: int  # of a micro-batch
    length: int  # tokens of a row
    num_micro_batches: int  # micro-batches of a step
    device: str = "cpu"  # or cuda
    flash: bool = False  # whether the device has FlashAttention


class MemoryInterval(NamedTuple):
    """Bytes of tensors over a stretch of a step, above what there was before it: at most, and behind it."""

    peak: int
    retained: int
    operations: Operations = Operations()


class ParamSize(NamedTuple):
    """A parameter, and the bytes that the optimizer keeps for it."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    trained: bool
    state: int
    expert: bool = False  # of experts, of which other ranks may have others


@dataclass(frozen=True)
class LayerPass:
    """One micro-batch forward and back. Layers are by kind."""

    before: MemoryInterval
    layers: tuple[MemoryInterval, ...]
    head: MemoryInterval
    head_back: MemoryInterval
    layers_back: tuple[MemoryInterval, ...]
    before_back: MemoryInterval


@dataclass(frozen=True)
class StepProfile:
    """A step, of a model whose layer i is of kind `kinds[i]`."""

    kinds: tuple[int, ...]
    layers: tuple[tuple[ParamSize, ...], ...]  # by kind
    root: tuple[ParamSize, ...]  # embedding, last norm, head
    first: LayerPass  # without gradients
    later: LayerPass  # with those of an earlier micro-batch
    update: MemoryInterval


def profile_step(net: Decoder, step: ProbeStep) -> StepProfile:
    """Measure a step of a model on no device, which is used up by it."""
    kinds, chosen = group_layers(net)
    every = [*net.layers]
    with fake_mode.fake_mode(step.device), FakeTensorMode(allow_non_fake_inputs=True):
        net.layers = cast("Iterable[Block]", nn.ModuleList([every[i] for i in chosen]))
        materialize_fake(net)
        step.memory.apply(net, CPU)
        optimizer = step.optimizer.build(
            step.adapter.param_groups(net), (p for m in net.layers for p in m.parameters())
        )
        update = partial(
            take_step, step.memory.wrap_optimizer(optimizer, DistributedContext.single_process()), step.clip
        )
        with MemoryTracker(step.flash) as live:
            live.record([*net.parameters(), *net.buffers()])
            first, later, moved = profile_passes(ForwardWalk(net, live), step, update)
        owned = [tuple(param_sizes(layer, optimizer.state)) for layer in net.layers]
        inner = {id(p) for layer in net.layers for p in layer.parameters()}
        root = tuple(param_sizes(net, optimizer.state, inner))
    return StepProfile(kinds, tuple(owned), root, first, later, moved)


def inference_memory(net: Decoder, step: ProbeStep) -> int:
    """Bytes at most while a model on no device, which is used up by it, makes hidden states of the rows of a step."""
    every = [*net.layers]
    with fake_mode.fake_mode(step.device), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        net.layers = cast("Iterable[Block]", nn.ModuleList([every[i] for i in group_layers(net)[1]]))
        materialize_fake(net)
        batch = rows(step)
        with MemoryTracker() as live:
            live.record([*net.parameters(), *net.buffers()])
            before = live.bytes
            net(batch.tokens, batch.positions, batch.layout, head_fn=lambda hidden, _: hidden[:0], sharded=True)
            return live.peak - before


def take_step(optimizer: TrainOptimizer, max_grad_norm: float) -> None:
    """The optimizer's part of a training step, as in the recipes."""
    optimizer.clip_grad_norm(max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def profile_passes(
    walk: "ForwardWalk", step: ProbeStep, update: Callable[[], None]
) -> tuple[LayerPass, LayerPass, MemoryInterval]:
    """A step whose optimizer has its state: micro-batches without and with gradients, and the update."""
    walk.run(step._replace(rows=1, length=min(step.length, WARMUP_TOKENS)))
    update()
    first = walk.run(step)
    later = walk.run(step) if step.num_micro_batches > 1 else first
    walk.begin()
    update()
    return first, later, walk.note("update", 0)


def group_layers(net: Decoder) -> tuple[tuple[int, ...], list[int]]:
    """The kind of every layer, and a layer of each kind. The first one stands alone: its input may want no gradient."""
    groups: dict[Any, list[int]] = {}
    for i, (layer, spec) in enumerate(zip(net.layers, net.spec.layers, strict=True)):
        params = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
        groups.setdefault((spec, i == 0, layer.attn.shares_kv, params), []).append(i)
    # A layer that takes keys of another wants it before itself; lenders are few.
    chosen = sorted(members[0] for members in groups.values())
    kinds = {i: chosen.index(members[0]) for members in groups.values() for i in members}
    return tuple(kinds[i] for i in range(len(kinds))), chosen


def materialize_fake(net: Decoder) -> None:
    """Parameters on no device become such of the CPU, without numbers."""
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is not None:
                tensor = torch.empty(p.shape, dtype=p.dtype, device=CPU)
                module._parameters[name] = nn.Parameter(tensor, requires_grad=p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device=CPU)
    net.tie()


def param_sizes(
    module: nn.Module, states: Mapping[Tensor, dict[str, Any]], without: Iterable[int] = ()
) -> Iterable[ParamSize]:
    """The parameters of a module, each once, with what an optimizer keeps for them."""
    experts = {
        id(p) for submodule in module.modules() if isinstance(submodule, Experts) for p in submodule.parameters()
    }
    for name, p in module.named_parameters():
        if id(p) not in without:
            values_of_state = states[p].values() if p in states else ()
            state = sum(value.nbytes for value in values_of_state if isinstance(value, Tensor))
            yield ParamSize(name, tuple(p.shape), p.nbytes, p.requires_grad, state, id(p) in experts)


class ForwardWalk:
    """Marks where a pass goes from one layer into the next, and back."""

    def __init__(self, net: Decoder, live: MemoryTracker) -> None:
        self.net, self.live = net, live
        self.count = sum(1 for _ in net.layers)
        self.events: dict[tuple[str, int], MemoryInterval] = {}
        self.start, self.forward = live.bytes, False
        self.before = live.operations
        for i, layer in enumerate(net.layers):
            layer.register_forward_pre_hook(self.pre_forward_hook(i))
            layer.register_forward_hook(self.forward_hook(i))

    def run(self, step: ProbeStep) -> LayerPass:
        """One micro-batch."""
        batch = rows(step)
        self.begin()
        self.forward, self.events = True, {}
        loss = step.loss(self.net, batch)
        self.forward = False
        self.note("head", 0)
        loss.backward()
        # Where the input of a layer wants no gradient, nobody said when the way back ended, and it did.
        unmarked = [i for i in range(self.count) if ("back", i) not in self.events]
        self.note(*(("back", unmarked[-1]) if unmarked else ("before_back", 0)))
        none, e = MemoryInterval(0, 0), self.events
        layers, back = (tuple(e.get((name, i), none) for i in range(self.count)) for name in ("layer", "back"))
        outer = e["before", 0], layers, e["head", 0], e["head_back", 0], back
        last = e.get(("before_back", 0), none)
        return LayerPass(*outer, last._replace(peak=max(last.retained, last.peak - self.tied_gradient_bytes())))

    def tied_gradient_bytes(self) -> int:
        """Bytes of a sum that torch makes in place of a gradient of real numbers, but not of shapes alone: of the two
        gradients of an embedding that is the head."""
        weight = self.net.embed.weight
        return weight.nbytes if self.net.spec.tie_word_embeddings and weight.requires_grad else 0

    def begin(self) -> None:
        """A stretch begins here."""
        self.live.mark()
        self.start, self.before = self.live.bytes, self.live.operations

    def note(self, name: str, index: int) -> MemoryInterval:
        """A stretch ends here, and the next one begins."""
        done = self.live.operations.plus(self.before, -1)
        interval = MemoryInterval(self.live.mark() - self.start, self.live.bytes - self.start, done)
        self.events[name, index] = interval
        self.start, self.before = self.live.bytes, self.live.operations
        return interval

    def pre_forward_hook(self, i: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if self.forward and i == 0:
                self.note("before", 0)
                if inputs[0].requires_grad:
                    inputs[0].register_hook(self.gradient_hook("back", 0))

        return hook

    def forward_hook(self, i: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if self.forward:
                self.note("layer", i)
                last = i == self.count - 1
                if output.requires_grad:
                    output.register_hook(self.gradient_hook(*(("head_back", 0) if last else ("back", i + 1))))

        return hook

    def gradient_hook(self, name: str, index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self.note(name, index)

        return hook


def rows(step: ProbeStep) -> Batch:
    """Rows of which every token is learnt, but each row's first."""
    tokens = torch.empty(step.rows, step.length, dtype=torch.long, device=CPU)
    targets, positions = torch.empty_like(tokens), torch.empty_like(tokens)
    return Batch(tokens, targets, positions, None, step.rows * (step.length - 1), tokens.numel())
