"""The layers of a model in training passes as CUDA graphs, in every recipe.

The host launches kernels one by one, which takes longer than the kernels themselves if a model or a micro-batch is
small. A graph has the same kernels and is launched at once. It reads and writes tensors of fixed address and size, so
the tokens of each micro-batch are copied to static tensors. Sizes that differ between micro-batches are rounded up: row
lengths with padding, and the number of documents with empty ones. The loss runs outside of the graphs, on hidden
states: the forward pass of the layers is one graph, and their backward pass another one.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.data.dataloader.batch import LENGTH_MULTIPLE
from tunekit.devices import device_capabilities, memory_info, memory_stats
from tunekit.distributed.context import DistributedContext
from tunekit.kernels.attention_choice import AttentionBackend, AttentionCall, choose_attention_backend, get_capabilities
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.models.decode import WARMUP_STEPS, Step, get_capture, is_sharded, run_detecting_waits, warn_eager
from tunekit.models.decoder import Decoder, HiddenFn
from tunekit.models.spec import MLP, Attention, LatentAttention, Layer
from tunekit.training.config import TrainConfig

MAX_GRAPHS = 32  # micro-batches of further shapes run without a graph
# Few sizes, so that most micro-batches have a shape that was captured. Longer rows cost time, and more or longer
# documents only thread blocks that end at once.
LENGTHS_PER_OCTAVE = 8  # row lengths between a power of 2 and the next one
DOCUMENTS_FACTOR = 4  # between two numbers of documents
# Parameters times tokens of a micro-batch up to which `auto` uses graphs. On an H200, LoRA steps of 4,096 tokens took
# 110 ms without and 55 ms with graphs at 1.2B parameters (5e12), but 275 and 270 ms at 8B (3.3e13).
MAX_AUTO_WORK = 1.6e13
# `auto` needs this multiple of the memory of the activations to be free, of which a graph keeps a second copy.
MIN_FREE_FACTOR = 2
# Of the first hidden states of a graph, relative to those without one. The kernels are the same.
MAX_ERROR = 1e-2


def find_obstacle(model: Decoder, dist: DistributedContext) -> str | None:
    """Why the layers of a model cannot be graphs; None if they can."""
    if not device_capabilities(model.device).graphs:
        return f"{device_capabilities(model.device).name} has no CUDA graphs"
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


def set_up_cuda_graphs(model: Decoder, cfg: TrainConfig, dist: DistributedContext) -> None:
    """Let training passes of a model run as graphs, as `cuda_graph` says, or log once why they do not."""
    if cfg.cuda_graph is False:
        return
    fixes = cfg.list_cuda_graph_conflicts()
    reason = f"it needs {' '.join(fixes)}" if fixes else find_obstacle(model, dist)
    if reason is None:
        capture = get_capture(model)
        assert capture is not None
        model.layer_graphs = GraphedLayers(model, capture, MAX_AUTO_WORK if cfg.cuda_graph == "auto" else None)
    elif cfg.cuda_graph is True:
        warn_eager("cuda_graph", reason)
    elif device_capabilities(model.device).graphs:
        dist.log(f"cuda_graph: auto uses no graphs: {reason}")


class PassShape(NamedTuple):
    """Sizes that a graph is captured for."""

    rows: int
    length: int
    num_documents: int
    max_seqlen: int

    @classmethod
    def of(cls, tokens: Tensor, layout: SequenceLayout | None) -> "PassShape":
        """The rounded sizes of tokens (B, S) and of the documents in them."""
        rows, width = tokens.shape
        length = round_up(width, max(LENGTH_MULTIPLE, next_power_of_2(width) // (2 * LENGTHS_PER_OCTAVE)))
        if layout is None:
            return cls(rows, length, rows, length)
        lengths = layout.cu_seqlens.diff()
        longest = length // 2 if int(lengths.max()) + length - width <= length // 2 else length
        num_documents = 2 * DOCUMENTS_FACTOR
        while num_documents < len(lengths):
            num_documents *= DOCUMENTS_FACTOR
        return cls(rows, length, num_documents, longest)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least `n`."""
    return -(-n // multiple) * multiple


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least `n`."""
    return 1 << (n - 1).bit_length()


class StaticInputs:
    """Tokens, positions and bounds of documents in tensors of fixed address. Additional documents have no tokens."""

    def __init__(self, shape: PassShape, device: torch.device) -> None:
        self.shape = shape
        self.tokens, self.positions = (torch.zeros(shape[:2], dtype=torch.int64, device=device) for _ in range(2))
        bounds = torch.zeros(shape.num_documents + 1, dtype=torch.int32)
        self.layout, self.cu_seqlens = SequenceLayout(bounds), torch.zeros_like(bounds, device=device)
        self.layout.varlen_bounds[0, device] = self.cu_seqlens, shape.max_seqlen, self.cu_seqlens, shape.max_seqlen

    def fill(self, tokens: Tensor, positions: Tensor, layout: SequenceLayout | None) -> None:
        """Copy inputs of this shape."""
        rows, width = tokens.shape
        added = self.shape.length - width
        self.tokens.copy_(F.pad(tokens, (0, added)))
        self.positions.copy_(F.pad(positions, (0, added)))
        bounds = torch.arange(rows + 1) * width if layout is None else layout.cu_seqlens
        bounds = bounds + bounds // width * added  # padding belongs to the last document of a row
        num_tokens = rows * self.shape.length
        bounds = F.pad(bounds.int(), (0, self.shape.num_documents + 1 - len(bounds)), value=num_tokens)
        self.layout.cu_seqlens.copy_(bounds)
        self.cu_seqlens.copy_(copy_to_device(bounds, self.cu_seqlens.device))


class GraphedPass:
    """Forward and backward pass of one shape: eager at first, then captured as two graphs.

    Gradients are added to those of the parameters, and `hidden` and `grad` have fixed addresses after the capture.
    """

    def __init__(self, run: HiddenFn, inputs: StaticInputs, warmup_steps: int) -> None:
        self.run, self.inputs, self.warmup_steps = run, inputs, warmup_steps
        self.hidden: Tensor | None = None
        self.grad: Tensor | None = None
        self.num_eager = 0
        self.replay: Callable[[], None] | None = None  # of the forward pass; None: passes are eager
        self.replay_backward: Callable[[], None] | None = None
        self.waits = False  # whether an eager pass waited for the device, which cannot be captured

    def run_forward(self) -> None:
        with torch.enable_grad():
            self.hidden = self.run(self.inputs.tokens, self.inputs.positions, self.inputs.layout)

    def run_backward(self) -> None:
        assert self.hidden is not None
        torch.autograd.backward(self.hidden, self.grad)

    def forward(self) -> Tensor:
        """Hidden states of the inputs, without a gradient function."""
        self.call(self.replay, self.run_forward)
        assert self.hidden is not None
        return self.hidden.detach()

    def backward(self, grad: Tensor) -> None:
        """Add the gradients of the parameters, from those of the hidden states."""
        if self.replay_backward is None or self.grad is None:
            self.grad = grad
        else:
            self.grad.copy_(grad)
        self.call(self.replay_backward, self.run_backward)
        self.num_eager += 1

    def call(self, replay: Step | None, run: Step) -> None:
        if replay is not None:
            replay()
        elif self.num_eager == self.warmup_steps - 1:  # the first pass of a process loads kernels, which waits
            self.waits |= run_detecting_waits(run)
        else:
            run()

    def capture(self, capture: Callable[[Step], Step]) -> str | None:
        """Capture both passes, and compare the hidden states of the inputs. Returns the problem, if there is one."""
        self.run_forward()
        assert self.hidden is not None
        expected, self.grad = self.hidden.detach(), torch.zeros_like(self.hidden)
        try:
            replays = capture(self.run_forward), capture(self.run_backward)
        except RuntimeError as error:  # a kernel that cannot be captured
            return f"the capture failed: {str(error).partition(chr(10))[0]}"
        replays[0]()
        difference = float((self.hidden.detach() - expected).float().norm() / expected.float().norm())
        if not difference <= MAX_ERROR:
            return f"hidden states differ by {difference:.2g}"
        self.replay, self.replay_backward = replays
        return None


def has_memory(device: torch.device) -> bool:
    """Whether a device has memory for a second copy of the activations of the largest micro-batch so far."""
    stats, info = memory_stats(device), memory_info(device)
    if stats is None or info is None:
        return True
    allocated, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
    available = info[0] + reserved - allocated
    return available >= MIN_FREE_FACTOR * (stats["allocated_bytes.all.peak"] - allocated)


class ReplayedPass(torch.autograd.Function):
    """Calls a `GraphedPass` in both directions. The first argument requires a gradient, so that the result does."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, graphed_pass: GraphedPass, layers: "GraphedLayers") -> Tensor:  # noqa: ARG004
        ctx.graphed_pass, ctx.layers = graphed_pass, layers
        layers.pending = weakref.ref(ctx)
        return graphed_pass.forward()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.graphed_pass.backward(grad)
        ctx.layers.pending = None
        ctx.layers.keep_gradients()
        return None, None, None


class GraphedLayers:
    """Runs the layers of a model in training passes as graphs of their shape.

    Gradients are accumulated in tensors of fixed address. These become the gradients of the parameters again at the
    first micro-batch after the optimizer has freed them.
    """

    def __init__(self, model: nn.Module, capture: Callable[[Step], Step], max_work: float | None = None) -> None:
        """`max_work`: parameters times tokens of the largest micro-batch that runs as a graph; None: all do."""
        self.capture: Callable[[Step], Step] | None = capture
        self.params = [p for p in model.parameters() if p.requires_grad]
        num_params = sum(p.numel() for p in model.parameters())
        self.max_tokens = None if max_work is None else max_work / num_params
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.passes: dict[PassShape, GraphedPass] = {}
        self.trigger = torch.zeros((), device=self.params[0].device, requires_grad=True)
        self.pending: weakref.ref[Any] | None = None  # the forward pass whose backward pass has not run

    def __call__(self, run: HiddenFn, tokens: Tensor, positions: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Hidden states (B, S, dim) of tokens (B, S). `run` computes them without a graph."""
        self.restore_gradients()
        if not self.accepts(tokens, layout):
            return run(tokens, positions, layout)
        shape = PassShape.of(tokens, layout)
        if shape not in self.passes:
            if len(self.passes) >= MAX_GRAPHS:
                warn_eager("cuda_graph", f"micro-batches have more shapes than the {MAX_GRAPHS} that were captured")
                return run(tokens, positions, layout)
            warmup_steps = 1 if self.passes else WARMUP_STEPS  # the first shape shows whether the host waits
            self.passes[shape] = GraphedPass(run, StaticInputs(shape, tokens.device), warmup_steps)
        graphed_pass = self.passes[shape]
        graphed_pass.inputs.fill(tokens, positions, layout)
        self.capture_if_ready(graphed_pass)
        hidden = ReplayedPass.apply(self.trigger, graphed_pass, self)
        assert isinstance(hidden, Tensor)
        return hidden[:, : tokens.shape[1]]

    def accepts(self, tokens: Tensor, layout: SequenceLayout | None) -> bool:
        """Whether a micro-batch runs as a graph. Two passes at once do not: they share memory."""
        is_small = self.max_tokens is None or tokens.numel() <= self.max_tokens
        has_prefixes = layout is not None and layout.prefixes is not None
        is_pending = self.pending is not None and self.pending() is not None
        return self.capture is not None and is_small and not has_prefixes and not is_pending

    def capture_if_ready(self, graphed_pass: GraphedPass) -> None:
        """Capture a pass after its eager ones, or use no graphs from now on if that is impossible."""
        if graphed_pass.replay is not None or graphed_pass.num_eager < graphed_pass.warmup_steps:
            return
        assert self.capture is not None
        reason = None
        if any(item.waits for item in self.passes.values()):
            reason = "a layer waits for the device in each step"
        elif self.max_tokens is not None and not has_memory(graphed_pass.inputs.tokens.device):
            reason = "memory is short"
        reason = reason or graphed_pass.capture(self.capture)
        if reason is not None:
            warn_eager("cuda_graph", reason)
            self.capture = None
            self.passes.clear()

    def keep_gradients(self) -> None:
        """Remember the gradients of the first backward pass, which are used in all later ones."""
        if not self.gradients:
            self.gradients = [(param, param.grad) for param in self.params if param.grad is not None]

    def restore_gradients(self) -> None:
        """Zero the gradients and assign them to the parameters, unless an earlier micro-batch of the step has."""
        if self.gradients and self.gradients[0][0].grad is None:
            torch._foreach_zero_([grad for _, grad in self.gradients])  # pyright: ignore[reportPrivateImportUsage]
            for param, grad in self.gradients:
                param.grad = grad
