"""Forward and backward passes of micro-batches as CUDA graphs.

The host launches kernels one by one, which takes longer than the kernels themselves if a model or a micro-batch is
small. A graph has the same kernels and is launched at once. It reads and writes tensors of fixed address and size, so
each micro-batch is copied to static tensors. Sizes that differ between micro-batches are rounded up: row lengths with
padding, the number of target tokens with targets of weight 0, and the number of documents with empty ones.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.adapters.config import LoRAConfig
from tunekit.data.dataloader.batch import IGNORE, LENGTH_MULTIPLE, Batch
from tunekit.devices import capabilities
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.kernels.attention_choice import AttentionBackend, AttentionCall, choose_attention_backend, get_capabilities
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decode import MIN_REPLAYS, WARMUP_STEPS, StepGraph, get_capture, is_sharded, warn_eager
from tunekit.models.decoder import Decoder
from tunekit.models.spec import MLP, Attention, LatentAttention, Layer
from tunekit.training.config import TrainConfig

MAX_GRAPHS = 32  # micro-batches of further shapes run without a graph
# Few sizes, so that most micro-batches have a shape that was captured. Longer rows cost time, more targets logits, and
# more or longer documents only thread blocks that end at once.
LENGTHS_PER_OCTAVE = 8  # row lengths between a power of 2 and the next one
NUM_TARGET_SIZES = 8  # numbers of targets are multiples of 1/8 of the tokens
DOCUMENTS_FACTOR = 4  # between two numbers of documents

# Adds the gradients of a micro-batch, divided by a loss denominator. Returns its detached loss.
BackwardPass = Callable[[Batch, float | Tensor], Tensor]


def check_cuda_graph(cfg: TrainConfig, loss: CrossEntropy) -> None:
    """Raise FieldError for keys that a graph does not support."""
    # Targets of weight 0 are added, whose weight other losses might not read.
    reads_weights = loss.measure is None and type(loss).__call__ is CrossEntropy.__call__
    fixes = {
        "compile=false": cfg.compile,
        "memory.activation_checkpointing=none": cfg.memory.activation_checkpointing != "none",
        "memory.activation_offloading=false": cfg.memory.activation_offloading,
        "memory.optimizer_in_bwd=false": cfg.memory.optimizer_in_bwd,
        "precision.compute_dtype=bf16": cfg.precision.compute_dtype not in ("auto", "bf16"),
        "adapter.dropout=0": isinstance(cfg.adapter, LoRAConfig) and cfg.adapter.dropout > 0,
        "neftune_noise_alpha=null": cfg.neftune_noise_alpha is not None,
        "loss=crossentropy": not reads_weights,
    }
    if needed := " ".join(fix for fix, is_needed in fixes.items() if is_needed):
        raise FieldError("cuda_graph", f"not compatible with other keys. Set {needed}, or cuda_graph=false.")


def find_obstacle(model: Decoder, dist: DistributedContext) -> str | None:
    """Why steps of a model cannot be graphs; None if they can."""
    if not capabilities(model.device).graphs:
        return f"{capabilities(model.device).name} has no CUDA graphs"
    if dist.world_size > 1 or is_sharded(model):
        return "there are several processes"
    if model.compute_dtype != torch.bfloat16:
        return "precision.compute_dtype is not bf16"
    if not all(isinstance(layer.ffn, MLP) and has_static_attention(layer, model.device) for layer in model.spec.layers):
        return "only dense layers with FlashAttention, without chunks, are supported"
    return "LongRoPE depends on the lengths of documents" if model.rope_switch_lengths else None


def has_static_attention(layer: Layer, device: torch.device) -> bool:
    """Whether the mixer of a layer reads the bounds of documents on the device only."""
    mixer = layer.mixer
    if isinstance(mixer, LatentAttention):
        head_dim, is_supported = max(mixer.nope_dim + mixer.rope_dim, mixer.v_dim), True
    elif isinstance(mixer, Attention):
        needs_lse = mixer.sinks and not get_capabilities(device).flash_lse
        head_dim, is_supported = mixer.head_dim, not (mixer.chunk or mixer.softcap or needs_lse)
    else:
        return False
    call = AttentionCall(device.type, torch.bfloat16, head_dim, get_capabilities(device), is_packed=True)
    return is_supported and choose_attention_backend(call) is AttentionBackend.FLASH_VARLEN


def graph_backward_pass(backward_pass: BackwardPass, model: Decoder, dist: DistributedContext) -> BackwardPass:
    """The backward pass as graphs, if the model and the device support them."""
    if reason := find_obstacle(model, dist):
        warn_eager("cuda_graph", reason)
        return backward_pass
    capture = get_capture(model)
    assert capture is not None
    return GraphedBackwardPass(backward_pass, model, capture)


class BatchShape(NamedTuple):
    """Sizes that a graph is captured for."""

    rows: int
    length: int
    num_targets: int
    num_documents: int
    max_seqlen: int

    @classmethod
    def of(cls, batch: Batch) -> "BatchShape":
        """The rounded sizes of a micro-batch."""
        rows, width = batch.tokens.shape
        length = round_up(width, max(LENGTH_MULTIPLE, next_power_of_2(width) // (2 * LENGTHS_PER_OCTAVE)))
        num_tokens = rows * length
        num_targets = min(num_tokens, round_up(batch.num_target_tokens, max(1, num_tokens // NUM_TARGET_SIZES)))
        if batch.cu_seqlens is None:
            return cls(rows, length, num_targets, rows, length)
        lengths = batch.cu_seqlens.diff()
        longest = length // 2 if int(lengths.max()) + length - width <= length // 2 else length
        num_documents = 2 * DOCUMENTS_FACTOR
        while num_documents < len(lengths):
            num_documents *= DOCUMENTS_FACTOR
        return cls(rows, length, num_targets, num_documents, longest)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least `n`."""
    return -(-n // multiple) * multiple


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least `n`."""
    return 1 << (n - 1).bit_length()


class StaticBatch:
    """A micro-batch in tensors of fixed address, with the loss denominator of its step.

    Its loss equals that of the batch it is filled with: additional targets have weight 0, additional documents no
    tokens.
    """

    def __init__(self, shape: BatchShape, device: torch.device) -> None:
        self.shape = shape
        tokens, targets, positions = (torch.zeros(shape[:2], dtype=torch.int64, device=device) for _ in range(3))
        weights = torch.zeros(shape[:2], device=device)
        self.batch = Batch(
            tokens, targets, positions,
            cu_seqlens=torch.zeros(shape.num_documents + 1, dtype=torch.int32),
            num_target_tokens=shape.num_targets,
            num_tokens=tokens.numel(),
            loss_weights=weights,
        )  # fmt: skip
        self.cu_seqlens = torch.zeros(shape.num_documents + 1, dtype=torch.int32, device=device)
        layout = self.batch.layout
        assert layout is not None
        layout.varlen_bounds[0, device] = self.cu_seqlens, shape.max_seqlen, self.cu_seqlens, shape.max_seqlen
        self.denominator = torch.ones((), device=device)
        self.loss = torch.zeros((), device=device)

    def fill(self, batch: Batch, denominator: float | Tensor) -> None:
        """Copy a batch of this shape whose tensors are on the device."""
        rows, width = batch.tokens.shape
        padding = 0, self.shape.length - width
        targets, weights = F.pad(batch.targets, padding, value=IGNORE), batch.loss_weights
        weights = targets.new_ones(targets.shape, dtype=torch.float32) if weights is None else F.pad(weights, padding)
        targets, weights = add_targets(targets, weights, self.shape.num_targets - batch.num_target_tokens)
        assert self.batch.loss_weights is not None
        copies = (self.batch.tokens, self.batch.targets, self.batch.positions, self.batch.loss_weights)
        inputs = F.pad(batch.tokens, padding), targets, F.pad(batch.positions, padding), weights
        for static, new in zip(copies, inputs, strict=True):
            static.copy_(new)
        bounds = torch.arange(rows + 1) * width if batch.cu_seqlens is None else batch.cu_seqlens
        bounds = bounds + bounds // width * (self.shape.length - width)  # padding belongs to the last document of a row
        num_tokens = rows * self.shape.length
        self.set_bounds(F.pad(bounds.int(), (0, self.shape.num_documents + 1 - len(bounds)), value=num_tokens))
        self.denominator.fill_(denominator)

    def set_bounds(self, bounds: Tensor) -> None:
        """Set the bounds of documents (documents + 1,) on the host and on the device."""
        assert self.batch.cu_seqlens is not None
        self.batch.cu_seqlens.copy_(bounds)
        self.cu_seqlens.copy_(copy_to_device(bounds, self.cu_seqlens.device))


def add_targets(targets: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Replace `count` of the targets (B, S) that are IGNORE by a target of weight 0."""
    is_ignored = targets == IGNORE
    is_added = is_ignored & (is_ignored.flatten().cumsum(0).view_as(targets) <= count)
    return targets.masked_fill(is_added, 0), weights.masked_fill(is_added, 0)


class GraphedBackwardPass:
    """Runs the backward pass of each micro-batch as a graph of its shape, captured at the second one of this shape.

    Gradients are accumulated in tensors of fixed address. These become the gradients of the parameters again at the
    first micro-batch after the optimizer has freed them.
    """

    def __init__(
        self, backward_pass: BackwardPass, model: nn.Module, capture: Callable[[Callable[[], None]], Callable[[], None]]
    ) -> None:
        self.backward_pass, self.capture = backward_pass, capture
        self.params: Sequence[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.steps: dict[BatchShape, tuple[StaticBatch, StepGraph]] = {}

    def __call__(self, batch: Batch, denominator: float | Tensor) -> Tensor:
        """Add the gradients of a micro-batch whose tensors are on the device. Returns its loss."""
        shape = BatchShape.of(batch)
        self.restore_gradients()
        if shape not in self.steps and len(self.steps) >= MAX_GRAPHS:
            warn_eager("cuda_graph", f"micro-batches have more than {MAX_GRAPHS} shapes, set data.packing=true")
            return self.backward_pass(batch, denominator)
        if shape not in self.steps:
            static = StaticBatch(shape, batch.tokens.device)
            warmup_steps = 1 if self.steps else WARMUP_STEPS  # the first shape shows whether the host waits
            run_static = partial(self.run_static, static)
            self.steps[shape] = static, StepGraph(run_static, self.capture, "cuda_graph", warmup_steps=warmup_steps)
        static, graph = self.steps[shape]
        static.fill(batch, denominator)
        graph.run(shape, MIN_REPLAYS)
        if not self.gradients:
            self.gradients = [(param, param.grad) for param in self.params if param.grad is not None]
        return static.loss.clone()

    def run_static(self, static: StaticBatch) -> None:
        static.loss.copy_(self.backward_pass(static.batch, static.denominator))

    def restore_gradients(self) -> None:
        """Zero the gradients and assign them to the parameters, unless an earlier micro-batch of the step has."""
        if self.gradients and self.gradients[0][0].grad is None:
            torch._foreach_zero_([grad for _, grad in self.gradients])  # pyright: ignore[reportPrivateImportUsage]
            for param, grad in self.gradients:
                param.grad = grad
