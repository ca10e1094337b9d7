"""Linear head and cross-entropy, fused in chunks of tokens: the logits of all tokens are never materialized.

The loss of a token depends only on its own hidden state, so the forward pass computes the gradients of each chunk and
writes them over its logits. Nothing is computed twice.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from tunekit.devices import HALF_DTYPES
from tunekit.kernels import fake_mode
from tunekit.kernels.argument_checks import check_dim, check_tensor
from tunekit.kernels.cpp_extension import DTYPES, load_library
from tunekit.kernels.lm_head import LMHead, VocabShard, max_over_vocab, sum_over_ranks
from tunekit.kernels.torch_compile import disable_compile
from tunekit.kernels.triton_support import triton_kernels, uses_triton

LogitsLoss = Callable[[Tensor, Tensor], Tensor]  # fp32 logits (n, vocab) and targets (n,) to a scalar sum

# Bytes of the logits of a chunk. 2,048 tokens x 49,152 x 576 took 0.39 s with 64 MB, 0.40 s with 32 MB, 0.42 s with
# 256 MB and 0.70 s with 8 MB, where matmuls have too few rows. GPUs need larger chunks.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}
TOKEN_MULTIPLE = 64  # chunk sizes are a multiple of this, because kernels are built for each shape
GRAD_SLICE_SIZE = {"cpu": 2**22, "cuda": 2**26}  # elements of a weight gradient that are accumulated at a time
# Row stride of logits on CUDA in bytes. Tensor cores and vector loads of Triton kernels need rows that start at
# multiples of 16 bytes and 16 elements, which an odd vocabulary size (Granite: 49,155) does not provide.
ROW_ALIGNMENT = 128
SOURCE = Path(__file__).with_name("cross_entropy.cpp")


def compute_token_losses(
    logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool
) -> Tensor:
    """Cross-entropy (n,) in fp32 of raw logits (n, vocab); 0 for targets below 0.

    With x = softcap(scale * logits): (1 - smoothing) (lse(x) - x[target]) + smoothing (lse(x) - mean(x)) +
    z_loss lse(x)^2. `terms` are scale, softcap (0: none), smoothing and z_loss. With `gradient`, the gradient of the
    losses, each times its weight (n,), is written over the logits.
    """
    check_dim("cross_entropy", "logits", logits, 2)
    check_tensor("cross_entropy", "targets", targets, logits.shape[:1], targets.dtype, logits.device)
    if weights is not None:
        check_tensor("cross_entropy", "weights", weights, logits.shape[:1], weights.dtype, logits.device)
    if uses_triton(logits):
        return triton_kernels("cross_entropy").token_losses(logits, targets, weights, terms, gradient)
    lib = native_library(logits)
    if lib is None:
        return token_losses_reference(logits, targets, weights, terms, gradient)
    out, targets = torch.empty(len(logits)), targets.long().contiguous()
    weights = None if weights is None else weights.float().contiguous()
    pointers = (None if t is None else t.data_ptr() for t in (logits, targets, weights, out))
    sizes = *logits.shape, logits.stride(0), gradient, torch.get_num_threads()
    kernel = getattr(lib, f"compute_losses_{DTYPES[logits.dtype]}")
    num_invalid = kernel(*pointers, (ctypes.c_float * 4)(*terms), *sizes)
    if num_invalid:
        raise IndexError(f"{num_invalid} targets are >= the vocabulary size {logits.shape[1]}")
    return out


token_losses = torch.library.custom_op("tunekit::token_losses", compute_token_losses, mutates_args=("logits",))


@token_losses.register_fake
def _(logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def token_losses_reference(  # noqa: PLR0913
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    terms: list[float],
    gradient: bool,
    vocab_shard: VocabShard | None = None,
) -> Tensor:
    """Torch reference of `compute_token_losses`, also for the logits (n, size) of a vocabulary shard.

    Ranks communicate four values per token.
    """
    scale, softcap, smoothing, z_loss = terms
    x, is_target = scale_logits(logits, scale, softcap), targets >= 0
    index, total, is_local = targets, x.shape[1], is_target
    if vocab_shard is not None:
        index, total = targets - vocab_shard.start, vocab_shard.total
        is_local = is_target & (index >= 0) & (index < x.shape[1])
    index, maximum = index.where(is_local, 0)[:, None], max_over_vocab(x, vocab_shard)
    shifted = x - maximum  # before the sums, which are inaccurate for large values
    logit_sums = shifted.sum(-1) if smoothing else torch.zeros_like(maximum[:, 0])
    target_logits = shifted.gather(1, index).squeeze(1).where(is_local, 0)
    sums = sum_over_ranks(torch.stack([shifted.exp().sum(-1), target_logits, logit_sums]), vocab_shard)
    log_sum, target_logits, mean = sums[0].log(), sums[1], sums[2] / total
    lse = maximum[:, 0] + log_sum
    losses = log_sum + z_loss * lse.square() - (1 - smoothing) * target_logits - smoothing * mean
    if gradient:
        grad = (shifted - log_sum[:, None]).exp_().mul_(1 + 2 * z_loss * lse[:, None]).sub_(smoothing / total)
        grad.scatter_add_(1, index, torch.where(is_local, smoothing - 1, 0.0)[:, None])
        grad = grad * (1 - (x / softcap).square()) if softcap else grad
        grad = grad.mul_(scale if weights is None else scale * weights[:, None])
        logits.copy_(grad.masked_fill_(~is_target[:, None], 0))
    return losses.masked_fill(~is_target, 0)


def scale_logits(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scale and softcap raw logits (n, ids), in fp32."""
    x = raw.float() * scale
    return softcap * (x / softcap).tanh() if softcap else x


def token_entropies(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Entropies (n,) of softmax(softcap(scale * logits)) in nats, fp32, for raw logits (n, vocab)."""
    terms = [scale, softcap or 0.0, 0.0, 0.0]
    if fake_mode.is_fake():
        return logits.new_empty(len(logits), dtype=torch.float32)
    check_dim("token_entropies", "logits", logits, 2)
    if uses_triton(logits):
        return triton_kernels("cross_entropy").token_entropies(logits, terms)
    lib = native_library(logits)
    if lib is None:
        return token_entropies_reference(logits, terms)
    out = torch.empty(len(logits))
    sizes = *logits.shape, logits.stride(0), torch.get_num_threads()
    kernel = getattr(lib, f"compute_entropies_{DTYPES[logits.dtype]}")
    kernel(logits.data_ptr(), out.data_ptr(), (ctypes.c_float * 4)(*terms), *sizes)
    return out


def token_entropies_reference(logits: Tensor, terms: list[float]) -> Tensor:
    """Torch reference of `token_entropies`."""
    log_probs = scale_logits(logits, *terms[:2]).log_softmax(-1)
    probabilities = log_probs.exp()
    return -(probabilities * log_probs.masked_fill(probabilities == 0, 0)).sum(-1)


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for kind in DTYPES.values():
            losses, entropies = getattr(lib, f"compute_losses_{kind}"), getattr(lib, f"compute_entropies_{kind}")
            losses.argtypes, losses.restype = [*[pointer] * 5, *[size] * 3, ctypes.c_int, ctypes.c_int], size
            entropies.argtypes, entropies.restype = [*[pointer] * 3, *[size] * 3, ctypes.c_int], None
    return lib


def native_library(logits: Tensor) -> ctypes.CDLL | None:
    """The compiled library if it supports these logits, else None."""
    is_supported = logits.device.type == "cpu" and logits.dtype in DTYPES and logits.stride(1) == 1
    return compiled() if is_supported else None


class ChunkLoss(Protocol):
    """Losses (n,) or their sum (1,) of raw logits (n, vocab); writes the gradient over the logits."""

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor: ...


@dataclass(frozen=True)
class CrossEntropyTerms:
    """Cross-entropy with label smoothing and z-loss, of scaled and softcapped logits."""

    scale: float = 1.0
    softcap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    vocab_shard: VocabShard | None = None

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        terms = [self.scale, self.softcap or 0.0, self.smoothing, self.z_loss]
        if self.vocab_shard is not None:
            return token_losses_reference(logits, targets, weights, terms, gradient, self.vocab_shard)
        return token_losses(logits, targets, weights, terms, gradient)


@dataclass(frozen=True)
class CustomChunkLoss:
    """Differentiable sum over tokens, a function of scaled fp32 logits and targets."""

    loss_fn: LogitsLoss
    scale_logits: Callable[[Tensor], Tensor]
    vocab_shard: VocabShard | None = None

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        assert weights is None
        with torch.set_grad_enabled(gradient):
            raw = logits.detach().requires_grad_(gradient)
            logits32 = raw.float() if self.vocab_shard is None else self.vocab_shard.all_gather(raw.float())
            loss = self.loss_fn(self.scale_logits(logits32), targets)
        if gradient:
            logits.copy_(torch.autograd.grad(loss, raw)[0])
        return loss.detach().float().view(1)


class LinearHeadChunks:
    """Logits x W^T of a head without bias and adapter. Chunks share one buffer; the weight gradient is fp32.

    The first chunk writes the gradient instead of adding to zeros, which saves a pass over memory.
    """

    def __init__(self, head: LMHead, like: Tensor, size: int, trained: list[Tensor]) -> None:
        self.weight = head.weight.detach().to(like.dtype)
        self.buffer = logits_buffer(like, size, len(self.weight))
        self.trained, self.grads = trained, []

    def logits(self, x: Tensor, gradient: bool) -> Tensor:
        return torch.mm(x, self.weight.T, out=self.buffer[: len(x)])

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        first = not self.grads
        if first:
            self.grads = [torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in self.trained]
        for total in self.grads:
            add_product(total, grad, x, first)
        return grad @ self.weight


class AutogradHeadChunks:
    """Logits of any head, with gradients by autograd."""

    def __init__(self, head: LMHead, like: Tensor, size: int, trained: list[Tensor]) -> None:
        self.head, self.trained, self.grads = head, trained, zero_gradients(trained)

    def logits(self, x: Tensor, gradient: bool) -> Tensor:
        with torch.set_grad_enabled(gradient):
            self.x = x.detach().requires_grad_(gradient)
            self.raw_logits = self.head.raw_logits(self.x)
        return self.raw_logits.detach()

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        grad_input, *param_grads = torch.autograd.grad(self.raw_logits, (self.x, *self.trained), grad)
        for total, param_grad in zip(self.grads, param_grads, strict=True):
            total += param_grad
        return grad_input


def logits_buffer(like: Tensor, rows: int, vocab: int) -> Tensor:
    """Uninitialized logits (rows, vocab), whose rows are aligned on CUDA."""
    if fake_mode.device_type(like) != "cuda":
        return like.new_empty(rows, vocab)
    multiple = ROW_ALIGNMENT // like.itemsize
    return like.new_empty(rows, -(-vocab // multiple) * multiple)[:, :vocab]


def zero_gradients(like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in like]


def add_product(total: Tensor, grad: Tensor, x: Tensor, first: bool) -> None:
    """total (vocab, dim) += grad^T x, by slices that are computed in the dtype of `x`; total = grad^T x if `first`.

    On CUDA, one matmul accumulates in fp32: a launch instead of two per slice, and 8 instead of 12 bytes per element.
    """
    beta = 0 if first else 1
    if total.dtype == x.dtype:
        total.addmm_(grad.T, x, beta=beta)
        return
    if can_accumulate(total, x):
        if not fake_mode.is_fake():  # torch has no meta implementation
            torch.addmm(total, grad.T, x, out_dtype=total.dtype, beta=beta, out=total)
        return
    slice_rows = max(1, GRAD_SLICE_SIZE.get(fake_mode.device_type(x), GRAD_SLICE_SIZE["cpu"]) // x.shape[1])
    buffer = x.new_empty(slice_rows, x.shape[1])
    if fake_mode.is_fake():  # the other slices have the same cost
        total, grad = total[:slice_rows], grad[:, :slice_rows]
    for total_rows, grad_rows in zip(total.split(slice_rows), grad.T.split(slice_rows), strict=True):
        product = torch.mm(grad_rows, x, out=buffer[: len(total_rows)])
        total_rows.copy_(product) if first else total_rows.add_(product)


def can_accumulate(total: Tensor, x: Tensor) -> bool:
    """Whether matmuls of `x` can accumulate in `total` without intermediate rounding: cuBLAS, but not ROCm."""
    dtypes = total.dtype == torch.float32 and x.dtype in HALF_DTYPES
    return dtypes and fake_mode.device_type(x) == "cuda" and torch.version.hip is None


@dataclass(frozen=True)
class TokenChunks:
    """Target tokens, processed in chunks: `rows` (N,) of the hidden states, and their targets (N,)."""

    head: LMHead
    step: ChunkLoss
    rows: Tensor
    targets: Tensor

    def run(
        self,
        hidden: Tensor,
        trained: list[Tensor],
        gradient: bool,
        weights: Tensor | None = None,
        on_logits: Callable[[Tensor], object] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses and, with `gradient`, gradients of the hidden states (all, dim) and of the trained parameters.

        `on_logits` is called with the logits of each chunk before the gradient is written over them.
        """
        chunks_type = LinearHeadChunks if self.head.is_plain_linear else AutogradHeadChunks
        shard = self.head.vocab_shard
        num_ids = len(self.head.weight) if shard is None else shard.max_size  # all ranks use equal chunks
        is_wide = self.head.is_plain_linear and gradient and bool(trained)
        size = chunk_size(len(self.rows), num_ids, hidden, is_wide)
        layer = chunks_type(self.head, hidden, size, trained if gradient else [])
        losses, hidden_grad = [], torch.zeros_like(hidden) if gradient else hidden
        for start in range(0, len(self.rows), size):
            span = slice(start, start + size)
            rows = self.rows[span]
            x = F.pad(hidden.index_select(0, rows), (0, 0, 0, -len(rows) % TOKEN_MULTIPLE))
            logits = layer.logits(x, gradient)
            span_weights = None if weights is None else weights[span]
            if on_logits is not None:
                on_logits(logits[: len(rows)])
            losses.append(self.step(logits[: len(rows)], self.targets[span], span_weights, gradient))
            if gradient:
                logits[len(rows) :] = 0
                hidden_grad.index_copy_(0, rows, layer.backward(x, logits)[: len(rows)])
        all_losses = torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)
        return all_losses, [hidden_grad, *(layer.grads or zero_gradients(trained))] if gradient else []


def chunk_size(count: int, vocab: int, like: Tensor, wide: bool = False) -> int:
    """Tokens per chunk, a multiple of TOKEN_MULTIPLE. `wide`: twice as many, if chunks add to the head's gradient."""
    max_bytes = (1 + wide) * CHUNK_BYTES.get(fake_mode.device_type(like), CHUNK_BYTES["cpu"])
    max_blocks = max_bytes // (vocab * like.itemsize) // TOKEN_MULTIPLE or 1
    num_blocks = -(-count // TOKEN_MULTIPLE) or 1
    return TOKEN_MULTIPLE * -(-num_blocks // -(-num_blocks // max_blocks))


# Sums over tokens, and values per token


@disable_compile  # the number of target tokens differs from batch to batch, and each would cause a recompilation
def linear_cross_entropy(  # noqa: PLR0913
    hidden: Tensor, targets: Tensor, head: LMHead, step: ChunkLoss, rows: Tensor | None = None, weights: Any = None
) -> Tensor:
    """Sum of the chunk loss over tokens, for `hidden` (N, dim) and `targets` (N,). `rows` restricts it to these tokens.

    `weights` are those of the tokens, or None. The head may be quantized, adapted or tied.
    """
    return ChunkedSum.apply(weights, *prepare_chunks(hidden, targets, head, step, rows))


@disable_compile  # as above
def token_logps(hidden: Tensor, targets: Tensor, head: LMHead, rows: Tensor | None = None) -> Tensor:
    """Log-probability of each target, fp32 (N,), or of those in `rows`, with the logits of one chunk in memory.

    If the head is trained, the backward pass recomputes its logits, because gradients per token are not known before.
    """
    return -ChunkedPerToken.apply(None, *prepare_chunks(hidden, targets, head, default_terms(head), rows))


@disable_compile  # as above
def token_logps_and_entropies(
    hidden: Tensor, targets: Tensor, head: LMHead, rows: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities as in `token_logps`, and entropies of the predictions in nats, fp32 (N,), without gradients.

    Logits are divided by `temperature`. Uses the same memory, and reads the logits an additional time.
    """
    entropies: list[Tensor] = []
    terms = default_terms(head, temperature)

    def on_logits(logits: Tensor) -> None:
        all_logits = logits if head.vocab_shard is None else head.vocab_shard.all_gather(logits)
        entropies.append(token_entropies(all_logits, terms.scale, terms.softcap))

    losses = ChunkedPerToken.apply(on_logits, *prepare_chunks(hidden, targets, head, terms, rows))
    return -losses, torch.cat(entropies) if entropies else torch.zeros_like(losses)


def default_terms(head: LMHead, temperature: float = 1.0) -> CrossEntropyTerms:
    """Cross-entropy without label smoothing and z-loss, of logits that are divided by `temperature`."""
    softcap = None if head.softcap is None else head.softcap / temperature  # c tanh(x/c) / t = (c/t) tanh((x/t)/(c/t))
    return CrossEntropyTerms(head.scale / temperature, softcap, vocab_shard=head.vocab_shard)


def prepare_chunks(
    hidden: Tensor, targets: Tensor, head: LMHead, step: ChunkLoss, rows: Tensor | None
) -> tuple[Any, ...]:
    rows = torch.arange(len(hidden), device=hidden.device) if rows is None else rows
    trained = trained_params(head)
    if not torch.is_grad_enabled():  # ctx.needs_input_grad ignores torch.no_grad
        hidden, trained = hidden.detach(), []
    return TokenChunks(head, step, rows, targets.index_select(0, rows)), hidden, *trained


def trained_params(head: LMHead) -> list[Tensor]:
    return [p for p in head.parameters() if p.requires_grad]


class ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor | None, chunks: TokenChunks, hidden: Tensor, *trained: Tensor) -> Tensor:
        losses, grads = chunks.run(hidden, [*trained], any(ctx.needs_input_grad), weights)
        ctx.dtypes = [t.dtype for t in (hidden, *trained)]
        ctx.save_for_backward(*grads)
        return (losses if weights is None else losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(scale_gradient(grad, scale[0]).to(dtype) for grad, dtype in pairs)


class ChunkedPerToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, on_logits: Callable[[Tensor], object] | None, chunks: TokenChunks, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.chunks, ctx.recompute = chunks, bool(trained)
        ctx.random, ctx.devices = torch.get_rng_state(), get_device_states(hidden)
        losses, grads = chunks.run(hidden, [], not trained and any(ctx.needs_input_grad), on_logits=on_logits)
        ctx.save_for_backward(*grads or [hidden])
        return losses

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        if not ctx.recompute:
            scale = weights[0].new_zeros(len(saved)).index_copy_(0, ctx.chunks.rows, weights[0])
            return None, None, scale_gradient(saved, scale[:, None])
        trained = trained_params(ctx.chunks.head)
        with torch.random.fork_rng(devices=ctx.devices[0]):  # reproduces the dropout masks
            torch.set_rng_state(ctx.random)
            set_device_states(*ctx.devices)
            _, grads = ctx.chunks.run(saved, trained, True, weights[0])
        return None, None, *(grad.to(t.dtype) for grad, t in zip(grads, (saved, *trained), strict=True))


def scale_gradient(grad: Tensor, scale: Tensor) -> Tensor:
    """Multiply `grad` by `scale` in place. The scale stays fp32, because rounding it to bf16 would bias all tokens."""
    scales = scale.split(4096) if scale.dim() else repeat(scale)
    for chunk, chunk_scale in zip(grad.split(4096), scales, strict=False):
        chunk.copy_(chunk.float().mul_(chunk_scale))
    return grad
