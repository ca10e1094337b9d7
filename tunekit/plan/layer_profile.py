"""Memory profile of one layer of each kind, measured by running a training step on fake tensors.

A model with one layer of each kind runs two micro-batches and an optimizer step. Memory of layers, adapters,
quantization, recomputation and optimizers is therefore counted where it is allocated.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.kernels import fake_mode
from tunekit.memory.config import MemoryConfig
from tunekit.models.block import Block
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import Experts
from tunekit.optim.train_optimizer import TrainOptimizer
from tunekit.plan.memory_tracker import MemoryTracker, Operations
from tunekit.quantization.config import QuantizedWeightMixin

CPU = torch.device("cpu")
LossFn = Callable[[Decoder, Batch], Tensor]
WARMUP_TOKENS = 64  # length of the row of the first step, which creates the optimizer state


class OptimizerFactory(Protocol):
    def build(self, trained: Any, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer: ...


class ProbeStep(NamedTuple):
    """Options of a training step that determine its memory."""

    adapter: NoAdapter | LoRAConfig
    memory: MemoryConfig
    optimizer: OptimizerFactory
    loss: LossFn
    clip: float
    rows: int  # rows of a micro-batch
    length: int  # tokens of a row
    num_micro_batches: int  # micro-batches of a step
    device: str = "cpu"  # or cuda
    flash: bool = False  # whether the device has FlashAttention


class MemoryInterval(NamedTuple):
    """Bytes that an interval of a step allocates: at its peak, and those that are still allocated at its end."""

    peak: int
    retained: int
    operations: Operations = Operations()


class ParamSize(NamedTuple):
    """Shape and bytes of a parameter, and bytes of its optimizer state."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    trained: bool
    state: int
    expert: bool = False  # whether expert parallelism shards it


class LayerPass(NamedTuple):
    """Intervals of one micro-batch, forward and backward. Layers are indexed by kind."""

    before: MemoryInterval
    layers: tuple[MemoryInterval, ...]
    head: MemoryInterval
    head_back: MemoryInterval
    layers_back: tuple[MemoryInterval, ...]
    before_back: MemoryInterval


@dataclass(frozen=True)
class StepProfile:
    """Profile of a step. Layer i of the model is of kind `kinds[i]`."""

    kinds: tuple[int, ...]
    layers: tuple[tuple[ParamSize, ...], ...]  # by kind
    root: tuple[ParamSize, ...]  # embedding, last norm, head
    first: LayerPass  # first micro-batch, which allocates the gradients
    later: LayerPass  # later micro-batches, which accumulate into them
    update: MemoryInterval


def profile_step(decoder: Decoder, kinds: tuple[int, ...], step: ProbeStep) -> StepProfile:
    """Profile a step of a model on the meta device with one layer of each kind. Modifies the model.

    `kinds`: the kind of each layer of the whole model.
    """
    with fake_mode.fake_mode(step.device), FakeTensorMode(allow_non_fake_inputs=True):
        materialize_fake(decoder)
        step.memory.apply(decoder, CPU)
        optimizer = step.optimizer.build(
            step.adapter.param_groups(decoder), (p for m in decoder.layers for p in m.parameters())
        )
        train_optimizer = step.memory.wrap_optimizer(optimizer, DistributedContext.single_process())
        with MemoryTracker(step.flash) as tracker:
            tracker.record([*decoder.parameters(), *decoder.buffers()])
            first, later, moved = profile_passes(ForwardWalk(decoder, tracker), step, train_optimizer)
        owned = [tuple(param_sizes(layer, optimizer.state)) for layer in decoder.layers]
        inner = {id(p) for layer in decoder.layers for p in layer.parameters()}
        root = tuple(param_sizes(decoder, optimizer.state, inner))
    return StepProfile(kinds, tuple(owned), root, first, later, moved)


def inference_memory(decoder: Decoder, step: ProbeStep) -> int:
    """Peak bytes of a forward pass of a model on the meta device, without logits. Modifies the model."""
    keep_layers(decoder, group_layers(decoder)[1])
    with fake_mode.fake_mode(step.device), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        materialize_fake(decoder)
        batch = rows(step)
        with MemoryTracker() as tracker:
            tracker.record([*decoder.parameters(), *decoder.buffers()])
            before = tracker.bytes
            decoder(batch.tokens, batch.positions, batch.layout, head_fn=lambda hidden, _: hidden[:0], sharded=True)
            return tracker.peak - before


def profile_passes(
    walk: "ForwardWalk", step: ProbeStep, optimizer: TrainOptimizer
) -> tuple[LayerPass, LayerPass, MemoryInterval]:
    """Run a step with existing optimizer state. Return its first and a later micro-batch, and the update."""
    if step.memory.optimizer_in_bwd:
        walk.run(step._replace(rows=1, length=min(step.length, WARMUP_TOKENS)))
        optimizer.clip_grad_norm(step.clip)  # ends the step
    else:
        for parameter in walk.decoder.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
    first = walk.run(step)
    later = walk.run(step) if step.num_micro_batches > 1 else first
    walk.begin()
    optimizer.clip_grad_norm(step.clip)
    optimizer.step()
    optimizer.zero_grad()
    return first, later, walk.note("update", 0)


def group_layers(decoder: Decoder) -> tuple[tuple[int, ...], list[int]]:
    """The kind of each layer, and the index of one layer of each kind.

    The first layer is a kind of its own, because its input may need no gradient.
    """
    groups: dict[Any, list[int]] = {}
    for i, (layer, spec) in enumerate(zip(decoder.layers, decoder.spec.layers, strict=True)):
        params = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
        groups.setdefault((spec, i == 0, layer.attn.shares_kv, params), []).append(i)
    # A layer that shares the keys of an earlier layer needs that layer in the model.
    chosen = sorted(members[0] for members in groups.values())
    kinds = {i: chosen.index(members[0]) for members in groups.values() for i in members}
    return tuple(kinds[i] for i in range(len(kinds))), chosen


def copy_one_layer_per_kind(decoder: Decoder) -> tuple[tuple[int, ...], Decoder]:
    """The kind of each layer, and a copy of the model with one layer of each kind."""
    kinds, chosen = group_layers(decoder)
    part = copy(decoder)
    part._modules = dict(decoder._modules)
    keep_layers(part, chosen)
    codecs = {id(layer.codec): layer.codec for layer in part.modules() if isinstance(layer, QuantizedWeightMixin)}
    return kinds, deepcopy(part, codecs)  # Python modules cannot be copied


def keep_layers(decoder: Decoder, indices: Iterable[int]) -> None:
    """Remove all other layers of a model."""
    every = [*decoder.layers]
    decoder.layers = cast("Iterable[Block]", nn.ModuleList([every[i] for i in indices]))


def materialize_fake(decoder: Decoder) -> None:
    """Replace meta parameters and buffers by fake CPU tensors."""
    for module in decoder.modules():
        for name, p in module._parameters.items():
            if p is not None:
                tensor = torch.empty(p.shape, dtype=p.dtype, device=CPU)
                module._parameters[name] = nn.Parameter(tensor, requires_grad=p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device=CPU)
    decoder.tie()


def param_sizes(
    module: nn.Module, states: Mapping[Tensor, dict[str, Any]], without: Iterable[int] = ()
) -> Iterable[ParamSize]:
    """Sizes of the parameters of a module and of their optimizer state, except ids in `without`."""
    experts = {
        id(p) for submodule in module.modules() if isinstance(submodule, Experts) for p in submodule.parameters()
    }
    for name, p in module.named_parameters():
        if id(p) not in without:
            values_of_state = states[p].values() if p in states else ()
            state = sum(value.nbytes for value in values_of_state if isinstance(value, Tensor))
            yield ParamSize(name, tuple(p.shape), p.nbytes, p.requires_grad, state, id(p) in experts)


class ForwardWalk:
    """Splits forward and backward passes into intervals at the boundaries of layers."""

    def __init__(self, decoder: Decoder, tracker: MemoryTracker) -> None:
        self.decoder, self.tracker = decoder, tracker
        self.count = sum(1 for _ in decoder.layers)
        self.events: dict[tuple[str, int], MemoryInterval] = {}
        self.start, self.forward = tracker.bytes, False
        self.before = tracker.operations
        for i, layer in enumerate(decoder.layers):
            if i == 0:
                layer.register_forward_pre_hook(self.note_before)
            layer.register_forward_hook(partial(self.note_layer, i))

    def run(self, step: ProbeStep) -> LayerPass:
        """Run one micro-batch forward and backward."""
        batch = rows(step)
        self.begin()
        self.forward, self.events = True, {}
        loss = step.loss(self.decoder, batch)
        self.forward = False
        self.note("head", 0)
        loss.backward()
        # No hook marks the end of the backward pass of a layer whose input needs no gradient.
        unmarked = [i for i in range(self.count) if ("back", i) not in self.events]
        self.note(*(("back", unmarked[-1]) if unmarked else ("before_back", 0)))
        none, e = MemoryInterval(0, 0), self.events
        layers, back = (tuple(e.get((name, i), none) for i in range(self.count)) for name in ("layer", "back"))
        outer = e["before", 0], layers, e["head", 0], e["head_back", 0], back
        last = e.get(("before_back", 0), none)
        return LayerPass(*outer, last._replace(peak=max(last.retained, last.peak - self.tied_gradient_bytes())))

    def tied_gradient_bytes(self) -> int:
        """Bytes of the sum of both gradients of a tied embedding.

        Torch allocates it for fake tensors, but computes it in place for real ones.
        """
        weight = self.decoder.embed.weight
        return weight.nbytes if self.decoder.spec.tie_word_embeddings and weight.requires_grad else 0

    def begin(self) -> None:
        """Start an interval."""
        self.tracker.mark()
        self.start, self.before = self.tracker.bytes, self.tracker.operations

    def note(self, name: str, index: int) -> MemoryInterval:
        """End the current interval, store it under a name, and start the next one."""
        done = self.tracker.operations.plus(self.before, -1)
        interval = MemoryInterval(self.tracker.mark() - self.start, self.tracker.bytes - self.start, done)
        self.events[name, index] = interval
        self.start, self.before = self.tracker.bytes, self.tracker.operations
        return interval

    def note_before(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Hook before the first layer."""
        if self.forward:
            self.note("before", 0)
            if inputs[0].requires_grad:
                inputs[0].register_hook(partial(self.note_gradient, "back", 0))

    def note_layer(self, i: int, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Hook after a layer."""
        if self.forward:
            self.note("layer", i)
            if output.requires_grad:
                name, index = ("head_back", 0) if i == self.count - 1 else ("back", i + 1)
                output.register_hook(partial(self.note_gradient, name, index))

    def note_gradient(self, name: str, index: int, _: Tensor) -> None:
        self.note(name, index)


def rows(step: ProbeStep) -> Batch:
    """Batch in which all tokens but the first of each row are targets."""
    tokens = torch.empty(step.rows, step.length, dtype=torch.long, device=CPU)
    targets, positions = torch.empty_like(tokens), torch.empty_like(tokens)
    return Batch(tokens, targets, positions, None, step.rows * (step.length - 1), tokens.numel())
