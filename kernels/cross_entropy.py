"""Head and loss together, a chunk of tokens at a time: the logits of a step never exist as a whole.

The loss of a token depends on its own hidden state alone, so gradients are taken chunk by chunk in the forward pass,
while the logits are at hand: they are written over them, and nothing is computed twice.
"""

import ctypes
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from tunekit.devices import HALF_DTYPES
from tunekit.kernels import fake_mode
from tunekit.kernels.cpp_extension import load_library
from tunekit.kernels.torch_compile import disable_compile
from tunekit.kernels.triton_support import uses_triton

LogitsLoss = Callable[[Tensor, Tensor], Tensor]  # fp32 logits (n, vocab) and targets (n,) to a sum

# Bytes of the logits of one chunk. 2,048 tokens x 49,152 x 576 took 0.39 s with 64 MB, 0.40 with 32, 0.42 with 256, and
# 0.70 with 8, where products are of too few tokens. A GPU wants larger ones.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}
TOKEN_MULTIPLE = 64  # tokens: every step has another number of them, and kernels are made anew for every other shape
GRAD_SLICE_SIZE = {"cpu": 2**22, "cuda": 2**26}  # numbers of a weight whose gradient is added at once
# Bytes between rows of logits on CUDA are a multiple of this. Tensor cores and the vector loads of Triton kernels need
# rows that start at multiples of 16 bytes and 16 elements, which no odd vocabulary (Granite: 49,155) has by itself.
ROW_ALIGNMENT = 128
SOURCE = Path(__file__).with_name("cross_entropy.cpp")
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class VocabShard(Protocol):
    """Ids of the vocabulary, of which this rank has the logits of some. What it asks of others, all of them ask."""

    @property
    def start(self) -> int: ...  # the first id that is here

    @property
    def total(self) -> int: ...

    @property
    def max_size(self) -> int: ...  # of the rank that has most

    def all_reduce_sum(self, x: Tensor) -> Tensor: ...  # sum over the ranks, in place

    def all_reduce_max(self, x: Tensor) -> Tensor: ...  # maximum over the ranks, in place

    def all_gather(self, x: Tensor) -> Tensor: ...  # (n, total) from the columns of each rank


class LMHead(Protocol):
    """The last layer of a model, and what its family does to logits."""

    @property
    def weight(self) -> Tensor: ...  # (vocab, dim)

    @property
    def scale(self) -> float: ...

    @property
    def softcap(self) -> float | None: ...

    @property
    def vocab_shard(self) -> VocabShard | None: ...  # ids that `raw` makes logits for; None: all

    @property
    def is_plain_linear(self) -> bool:
        """Whether `raw(x)` is x W^T and nothing else."""
        ...

    def raw_logits(self, x: Tensor) -> Tensor:
        """The product alone, (n, dim) to (n, vocab)."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def compute_token_losses(
    logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool
) -> Tensor:
    """Losses (n,) of logits (n, vocab) as a product gave them, in fp32; a target below 0 counts for nothing.

    `terms` are scale, softcap (0: none), smoothing and weight of the squared log-normalizer. With `gradient`, the
    logits become the gradient of the losses, each times its weight (n,).
    """
    if uses_triton(logits):
        return gpu().token_losses(logits, targets, weights, terms, gradient)
    lib = native_library(logits)
    if lib is None:
        return token_losses_reference(logits, targets, weights, terms, gradient)
    out, targets = torch.empty(len(logits)), targets.long().contiguous()
    weights = None if weights is None else weights.float().contiguous()
    places = (None if t is None else t.data_ptr() for t in (logits, targets, weights, out))
    sizes = *logits.shape, logits.stride(0), gradient, torch.get_num_threads()
    wrong = getattr(lib, f"losses_{DTYPES[logits.dtype]}")(*places, (ctypes.c_float * 4)(*terms), *sizes)
    if wrong:
        raise IndexError(f"{wrong} targets lie beyond the {logits.shape[1]} tokens of the vocabulary")
    return out


token_losses = torch.library.custom_op("tunekit::token_losses", compute_token_losses, mutates_args=("logits",))


@token_losses.register_fake
def _(logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def token_losses_reference(
    logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool
) -> Tensor:
    """The same in plain torch."""
    scale, softcap, smoothing, z_loss = terms
    real, at = targets >= 0, targets.clamp(min=0)[:, None]
    x = logits.float() * scale
    x = softcap * (x / softcap).tanh() if softcap else x
    logs, normal = x.log_softmax(-1), x.logsumexp(-1)
    losses = z_loss * normal.square() - (1 - smoothing) * logs.gather(1, at).squeeze(1)
    losses = losses - smoothing * logs.mean(-1) if smoothing else losses
    if gradient:
        grad = logs.exp_().mul_(1 + 2 * z_loss * normal[:, None]).sub_(smoothing / logits.shape[1])
        grad.scatter_add_(1, at, torch.full_like(x[:, :1], smoothing - 1))
        grad = grad * (1 - (x / softcap).square()) if softcap else grad
        grad = grad.mul_(scale if weights is None else scale * weights[:, None])
        logits.copy_(grad.masked_fill_(~real[:, None], 0))
    return losses.masked_fill(~real, 0)


def sharded_token_losses(  # noqa: PLR0913 (as above)
    logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool, share: VocabShard
) -> Tensor:
    """The same of logits (n, some) of the ids that are here. Three numbers a token are asked of the other ranks."""
    scale, softcap, smoothing, z_loss = terms
    x = logits.float() * scale
    x = softcap * (x / softcap).tanh() if softcap else x
    at = targets - share.start
    here = (at >= 0) & (at < x.shape[1]) & (targets >= 0)
    at = at.where(here, 0)[:, None]
    most = share.all_reduce_max(x.amax(-1))
    wanted = x.gather(1, at).squeeze(1).where(here, 0)
    sums, wanted, every = share.all_reduce_sum(torch.stack([(x - most[:, None]).exp().sum(-1), wanted, x.sum(-1)]))
    normal = most + sums.log()
    losses = normal + z_loss * normal.square() - (1 - smoothing) * wanted - smoothing * every / share.total
    if gradient:
        grad = (x - normal[:, None]).exp_().mul_(1 + 2 * z_loss * normal[:, None]).sub_(smoothing / share.total)
        grad.scatter_add_(1, at, torch.where(here, smoothing - 1, 0.0)[:, None])
        grad = grad * (1 - (x / softcap).square()) if softcap else grad
        grad = grad.mul_(scale if weights is None else scale * weights[:, None])
        logits.copy_(grad.masked_fill_(targets[:, None] < 0, 0))
    return losses.masked_fill(targets < 0, 0)


def token_entropies(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Entropies (n,) in nats, in fp32, of what logits (n, vocab) expect, as a product gave them."""
    terms = [scale, softcap or 0.0, 0.0, 0.0]
    if fake_mode.is_fake():
        return logits.new_empty(len(logits), dtype=torch.float32)
    if uses_triton(logits):
        return gpu().token_entropies(logits, terms)
    lib = native_library(logits)
    if lib is None:
        return token_entropies_reference(logits, terms)
    out = torch.empty(len(logits))
    sizes = *logits.shape, logits.stride(0), torch.get_num_threads()
    getattr(lib, f"entropies_{DTYPES[logits.dtype]}")(
        logits.data_ptr(), out.data_ptr(), (ctypes.c_float * 4)(*terms), *sizes
    )
    return out


def token_entropies_reference(logits: Tensor, terms: list[float]) -> Tensor:
    """The same in plain torch."""
    scale, softcap, *_ = terms
    x = logits.float() * scale
    logs = (softcap * (x / softcap).tanh() if softcap else x).log_softmax(-1)
    shares = logs.exp()
    return -(shares * logs.masked_fill(shares == 0, 0)).sum(-1)


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        place, size = ctypes.c_void_p, ctypes.c_int64
        for kind in DTYPES.values():
            losses, entropies = getattr(lib, f"losses_{kind}"), getattr(lib, f"entropies_{kind}")
            losses.argtypes, losses.restype = [*[place] * 5, *[size] * 3, ctypes.c_int, ctypes.c_int], size
            entropies.argtypes, entropies.restype = [*[place] * 3, *[size] * 3, ctypes.c_int], None
    return lib


def native_library(logits: Tensor) -> ctypes.CDLL | None:
    """The compiled functions, if there are some for these logits."""
    fits = logits.device.type == "cpu" and logits.dtype in DTYPES and logits.stride(1) == 1
    return compiled() if fits else None


@cache
def gpu() -> Any:
    return importlib.import_module("tunekit.kernels.cross_entropy_triton")


class ChunkLoss(Protocol):
    """Losses (n,) or their sum (1,), of logits (n, vocab) which become the gradient, each loss times its weight."""

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor: ...


@dataclass(frozen=True)
class CrossEntropyTerms:
    """Cross-entropy with label smoothing and z-loss, of logits that are scaled and capped first."""

    scale: float = 1.0
    softcap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    share: VocabShard | None = None

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        terms = [self.scale, self.softcap or 0.0, self.smoothing, self.z_loss]
        if self.share is not None:
            return sharded_token_losses(logits, targets, weights, terms, gradient, self.share)
        return token_losses(logits, targets, weights, terms, gradient)


@dataclass(frozen=True)
class CustomChunkLoss:
    """A sum over tokens that autograd can follow, of fp32 logits as `finish` leaves them."""

    loss_fn: LogitsLoss
    scale_logits: Callable[[Tensor], Tensor]
    share: VocabShard | None = None

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        assert weights is None
        with torch.set_grad_enabled(gradient):
            raw = logits.detach().requires_grad_(gradient)
            loss = self.loss_fn(
                self.scale_logits(raw.float() if self.share is None else self.share.all_gather(raw.float())), targets
            )
        if gradient:
            logits.copy_(torch.autograd.grad(loss, raw)[0])
        return loss.detach().float().view(1)


# Logits of a chunk, and back


class LinearHeadChunks:
    """Of a head that is one product, into the same memory for every chunk. Its gradient adds up in fp32.

    The first chunk's is written and not added: zeros would be written, read and touch memory for the first time.
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
    """Of a head that may be anything, by autograd."""

    def __init__(self, head: LMHead, like: Tensor, size: int, trained: list[Tensor]) -> None:
        self.head, self.trained, self.grads = head, trained, zero_gradients(trained)

    def logits(self, x: Tensor, gradient: bool) -> Tensor:
        with torch.set_grad_enabled(gradient):
            self.x = x.detach().requires_grad_(gradient)
            self.raw_logits = self.head.raw_logits(self.x)
        return self.raw_logits.detach()

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        first, *others = torch.autograd.grad(self.raw_logits, (self.x, *self.trained), grad)
        for total, other in zip(self.grads, others, strict=True):
            total += other
        return first


def logits_buffer(like: Tensor, rows: int, vocab: int) -> Tensor:
    """Uninitialized logits (rows, vocab), whose rows are aligned on CUDA."""
    if fake_mode.device_type(like) != "cuda":
        return like.new_empty(rows, vocab)
    multiple = ROW_ALIGNMENT // like.itemsize
    return like.new_empty(rows, -(-vocab // multiple) * multiple)[:, :vocab]


def zero_gradients(like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in like]


def add_product(total: Tensor, grad: Tensor, x: Tensor, first: bool) -> None:
    """total (vocab, dim) += grad^T x, of which no more than a slice is ever rounded to the dtype of `x`.

    At `first` it is put there. On CUDA it is one product that accumulates in fp32: one launch instead of two for each
    slice, and 8 bytes of traffic per number instead of 12, besides the operands.
    """
    beta = 0 if first else 1
    if total.dtype == x.dtype:
        total.addmm_(grad.T, x, beta=beta)
        return
    if can_accumulate(total, x):
        if not fake_mode.is_fake():  # torch has no shape function for it
            torch.addmm(total, grad.T, x, out_dtype=total.dtype, beta=beta, out=total)
        return
    step = max(1, GRAD_SLICE_SIZE.get(x.device.type, GRAD_SLICE_SIZE["cpu"]) // x.shape[1])
    room = x.new_empty(step, x.shape[1])
    if fake_mode.is_fake():  # the other slices need no more
        total, grad = total[:step], grad[:, :step]
    for part, of in zip(total.split(step), grad.T.split(step), strict=True):
        made = torch.mm(of, x, out=room[: len(part)])
        part.copy_(made) if first else part.add_(made)


def can_accumulate(total: Tensor, x: Tensor) -> bool:
    """Whether products of `x` can be added to `total` without rounding in between: with cuBLAS, but not with ROCm."""
    dtypes = total.dtype == torch.float32 and x.dtype in HALF_DTYPES
    return dtypes and fake_mode.device_type(x) == "cuda" and torch.version.hip is None


@dataclass(frozen=True)
class TokenChunks:
    """Learnt tokens, a chunk at a time: `rows` (N,) of the hidden states, and what is to follow on them (N,)."""

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
        look: Callable[[Tensor], object] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses and, with `gradient`, those of the hidden states (all, dim) and of what the head trains.

        `look` sees the logits of each chunk before they become a gradient.
        """
        way = LinearHeadChunks if self.head.is_plain_linear else AutogradHeadChunks
        ids = len(self.head.weight) if self.head.vocab_shard is None else self.head.vocab_shard.max_size  # all ranks take equal chunks
        size = chunk_size(len(self.rows), ids, hidden, way is LinearHeadChunks and gradient and bool(trained))
        layer = way(self.head, hidden, size, trained if gradient else [])
        losses, to_hidden = [], torch.zeros_like(hidden) if gradient else hidden
        for at in range(0, len(self.rows), size):
            part = slice(at, at + size)
            rows = self.rows[part]
            x = F.pad(hidden.index_select(0, rows), (0, 0, 0, -len(rows) % TOKEN_MULTIPLE))
            logits = layer.logits(x, gradient)
            of = None if weights is None else weights[part]
            if look is not None:
                look(logits[: len(rows)])
            losses.append(self.step(logits[: len(rows)], self.targets[part], of, gradient))
            if gradient:
                logits[len(rows) :] = 0
                to_hidden.index_copy_(0, rows, layer.backward(x, logits)[: len(rows)])
        found = torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)
        return found, [to_hidden, *(layer.grads or zero_gradients(trained))] if gradient else []


def chunk_size(count: int, vocab: int, like: Tensor, wide: bool = False) -> int:
    """Tokens of a chunk, a multiple of MULTIPLE: all chunks have about the same number.

    `wide`: each chunk adds to the gradient of the whole head, which is larger than its logits: half as many are made.
    """
    most = (1 + wide) * CHUNK_BYTES.get(like.device.type, CHUNK_BYTES["cpu"]) // (vocab * like.itemsize) // TOKEN_MULTIPLE or 1
    parts = -(-count // TOKEN_MULTIPLE) or 1
    return TOKEN_MULTIPLE * -(-parts // -(-parts // most))


# Sums over tokens, and each token's


@disable_compile  # the number of learnt tokens differs from batch to batch, and each would compile anew
def linear_cross_entropy(
    hidden: Tensor, targets: Tensor, head: LMHead, step: ChunkLoss, rows: Tensor | None = None
) -> Tensor:
    """Sum over tokens: `hidden` (N, dim), `targets` (N,), of which only `rows` count, if they are given.

    The head may be anything: plain, adapted, tied. A frozen one costs no gradient of its own.
    """
    return ChunkedSum.apply(*prepare_chunks(hidden, targets, head, step, rows))


@disable_compile  # as above
def token_logps(hidden: Tensor, targets: Tensor, head: LMHead, rows: Tensor | None = None) -> Tensor:
    """Log-probability of each target, fp32 (N,), or of those in `rows` alone, with the memory of one chunk's logits.

    A head that is trained has its logits computed again in the backward pass, where the weights of tokens are known.
    """
    return -ChunkedPerToken.apply(None, *prepare_chunks(hidden, targets, head, default_terms(head), rows))


@disable_compile  # as above
def token_logps_and_entropies(
    hidden: Tensor, targets: Tensor, head: LMHead, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities as above, and the entropies in nats of what was expected there, fp32 (N,), without gradients.

    The memory is the same, and the logits are read once more.
    """
    found: list[Tensor] = []

    def look(logits: Tensor) -> None:
        whole = logits if head.vocab_shard is None else head.vocab_shard.all_gather(logits)
        found.append(token_entropies(whole, head.scale, head.softcap))

    losses = ChunkedPerToken.apply(look, *prepare_chunks(hidden, targets, head, default_terms(head), rows))
    return -losses, torch.cat(found) if found else torch.zeros_like(losses)


def default_terms(head: LMHead) -> CrossEntropyTerms:
    """Cross-entropy and nothing else."""
    return CrossEntropyTerms(head.scale, head.softcap, share=head.vocab_shard)


def prepare_chunks(
    hidden: Tensor, targets: Tensor, head: LMHead, step: ChunkLoss, rows: Tensor | None
) -> tuple[Any, ...]:
    rows = torch.arange(len(hidden), device=hidden.device) if rows is None else rows
    trained = trained_params(head)
    if not torch.is_grad_enabled():  # a function is told of gradients that nobody will ask for
        hidden, trained = hidden.detach(), []
    return TokenChunks(head, step, rows, targets.index_select(0, rows)), hidden, *trained


def trained_params(head: LMHead) -> list[Tensor]:
    return [p for p in head.parameters() if p.requires_grad]


class ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: TokenChunks, hidden: Tensor, *trained: Tensor) -> Tensor:
        losses, grads = chunks.run(hidden, [*trained], any(ctx.needs_input_grad))
        ctx.dtypes = [t.dtype for t in (hidden, *trained)]
        ctx.save_for_backward(*grads)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, *(scale_gradient(grad, scale[0]).to(dtype) for grad, dtype in pairs)


class ChunkedPerToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, look: Callable[[Tensor], object] | None, chunks: TokenChunks, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.chunks, ctx.again = chunks, bool(trained)
        ctx.random, ctx.devices = torch.get_rng_state(), get_device_states(hidden)
        losses, grads = chunks.run(hidden, [], not trained and any(ctx.needs_input_grad), look=look)
        ctx.save_for_backward(*grads or [hidden])
        return losses

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        if not ctx.again:
            each = weights[0].new_zeros(len(kept)).index_copy_(0, ctx.chunks.rows, weights[0])
            return None, None, scale_gradient(kept, each[:, None])
        trained = trained_params(ctx.chunks.head)
        with torch.random.fork_rng(devices=ctx.devices[0]):  # dropout falls on the same numbers again
            torch.set_rng_state(ctx.random)
            set_device_states(*ctx.devices)
            _, grads = ctx.chunks.run(kept, trained, True, weights[0])
        return None, None, *(grad.to(t.dtype) for grad, t in zip(grads, (kept, *trained), strict=True))


def scale_gradient(grad: Tensor, scale: Tensor) -> Tensor:
    """`grad` times `scale` in place. The scale stays fp32: rounded to bf16, it would be off alike for every token."""
    pieces = scale.split(4096) if scale.dim() else repeat(scale)
    for part, by in zip(grad.split(4096), pieces, strict=False):
        part.copy_(part.float().mul_(by))
    return grad
