"""The linear layers and the embedding of every model: a weight, and a place for an update to it."""

from collections.abc import Callable, Iterator, Sequence
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.distributed.collectives import MeshDim, VocabShard
from tunekit.distributed.sharding import adopt_tensor, copy_to_shard, shard_slice
from tunekit.kernels.grouped_mm import grouped_mm
from tunekit.kernels.linear import linear
from tunekit.models.weight_init import InitMixin, normal_init
from tunekit.models.weight_map import Shape

Gather = Callable[[Tensor], Tensor]  # such as the whole of what a rank has a part of
CAST_CHUNK_NUMEL = (
    2**25
)  # numbers of a weight that are cast at once where nothing is learnt: heads have up to 30 times as many


def identity(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, as it is."""
    return tensor


class Linear(nn.Linear, InitMixin):
    """Weights are cast to the dtype of what comes in: trained weights may be fp32 while products run in bf16.

    A format replaces what asks for the weight; an adapter sets `update`. The names of the parameters stay.
    """

    update: "Callable[[Sequence[Linear], Tensor], tuple[Tensor, ...]] | None" = None  # of layers with the same input
    # An adapter hangs these here, under the names of PEFT; without one they do not exist.
    lora_A: "Linear"  # (rank, in)
    lora_B: "Linear"  # (out, rank)
    lora_A0: Tensor  # what A and B were at the start, where their product was not zero
    lora_B0: Tensor
    lora_magnitude_vector: nn.Parameter  # (out,)
    lora_scale: float
    colwise_mesh: MeshDim | None = None  # ranks that have the other outputs
    rowwise_mesh: MeshDim | None = None  # ranks that have the other inputs: what each makes is a part of a sum

    def matmul(self, x: Tensor) -> Tensor:
        """x W^T + b: (..., in) to (..., out)."""
        if self.weight.dtype == x.dtype or self.weight.numel() <= CAST_CHUNK_NUMEL or torch.is_grad_enabled():
            return linear(x, self.weight, self.effective_bias)
        chunks = self.weight.split(max(1, CAST_CHUNK_NUMEL // self.in_features))
        y = torch.cat([linear(x, part) for part in chunks], dim=-1)
        return y if self.effective_bias is None else y + self.effective_bias.to(x.dtype)

    @property
    def effective_bias(self) -> Tensor | None:
        """The bias, which is added to a sum once."""
        return bias_on_first_rank(self.bias, self.rowwise_mesh)

    @property
    def is_frozen(self) -> bool:
        """Whether the weight is none that is trained."""
        return not self.weight.requires_grad

    def matmul_backward(self, grad: Tensor, into: Tensor | None = None) -> Tensor:
        """grad W: (N, out) to (N, in), added to `into` if that is there."""
        weight = self.weight.to(grad.dtype)
        return grad @ weight if into is None else into.addmm_(grad, weight)

    @property
    def shape(self) -> Shape:
        """That of the whole weight (out, in), whatever part of it is here."""
        return shard_slice(self.weight).shape

    def dequantize(self, gather: Gather = identity) -> Tensor:
        """The weight (out, in) as numbers, of what `get` makes of all that it is kept in."""
        return gather(self.weight)

    def iter_fp32_rows(self, num_rows: int) -> Iterator[Tensor]:
        """The weight in fp32, so many rows at a time."""
        return (part.float() for part in self.weight.split(num_rows))

    def load_weight(self, weight: Tensor) -> None:
        """Take a weight (out, in) as it stands in a checkpoint, and for good."""
        adopt_tensor(self.weight, weight)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """A normal weight, no bias."""
        self.load_weight(normal_init(self.shape, std, generator))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return self.matmul(input) if self.update is None else self.update((self,), input)[0]


class GroupedLinear(InitMixin):
    """The linear layers of all experts in one weight, with the same places for a format and an adapter as Linear."""

    update: "Callable[[Sequence[GroupedLinear], Tensor, Tensor], tuple[Tensor, ...]] | None" = None
    lora_A: nn.Parameter  # (E, rank, in)
    lora_B: nn.Parameter  # (E, out, rank)
    lora_scale: float
    bias: nn.Parameter | None
    rowwise_mesh: MeshDim | None = None  # ranks that have the other inputs

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.zeros(experts, out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(experts, out_features)) if bias else None)

    def matmul(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x W[e]^T + b[e] of rows (N, in) sorted by expert, of which each has `sizes` (E,): (N, out)."""
        return grouped_mm(x, self.weight, sizes, self.effective_bias)

    @property
    def effective_bias(self) -> Tensor | None:
        """The biases, which are added to a sum once."""
        return bias_on_first_rank(self.bias, self.rowwise_mesh)

    @property
    def shape(self) -> Shape:
        """That of the whole weight (E, out, in), whatever part of it is here."""
        return shard_slice(self.weight).shape

    def dequantize(self, gather: Gather = identity) -> Tensor:
        """The weight (E, out, in) as numbers, of what `get` makes of all that it is kept in."""
        return gather(self.weight)

    def load_weight(self, weight: Tensor) -> None:
        """Take a weight (E, out, in) as it stands in a checkpoint, and for good."""
        adopt_tensor(self.weight, weight)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Normal weights, no biases."""
        self.load_weight(normal_init(self.shape, std, generator))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return self.matmul(x, sizes) if self.update is None else self.update((self,), x, sizes)[0]


def bias_on_first_rank(bias: Tensor | None, rowwise_mesh: MeshDim | None) -> Tensor | None:
    """A bias for the first of the ranks that make a sum, zeros for the others."""
    return bias if bias is None or rowwise_mesh is None or rowwise_mesh.index == 0 else bias * 0


def shared_input_linears(layers: Sequence[Linear] | Sequence[GroupedLinear], *inputs: Tensor) -> tuple[Tensor, ...]:
    """What each layer makes of the same inputs. Updates of one adapter read them once, for all of them."""
    update: Callable[..., tuple[Tensor, ...]] | None = layers[0].update
    if update is None or not all(is_same_method(layer.update, update) for layer in layers):
        return tuple(layer(*inputs) for layer in layers)
    return update(layers, *inputs)


def is_same_method(a: object, b: object) -> bool:
    """`a == b` for bound methods. The compiler of torch 2.11 cannot compare them by `==`."""
    if not isinstance(a, MethodType) or not isinstance(b, MethodType):
        return a is b
    return a.__self__ is b.__self__ and a.__func__ is b.__func__


class Embedding(nn.Embedding, InitMixin):
    """Rows of a table; an adapter may set `update` here as well."""

    update: "Callable[[Embedding, Tensor], Tensor] | None" = None
    lora_embedding_A: nn.Parameter  # (rank, ids)
    lora_embedding_B: nn.Parameter  # (dim, rank)
    lora_scale: float
    vocab_shard: VocabShard | None = None  # ids that are here: rows of others are zeros

    def reset_parameters(self) -> None:
        """Nothing: weights are read, or drawn by `reset`. torch would draw them on no device, and for that load its
        compiler (1.8 s, 160 MB)."""

    def embed(self, tokens: Tensor) -> Tensor:
        """(...) token ids to (..., dim)."""
        return self.lookup(tokens, self.weight)

    def lookup(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of a table (ids, ...) that has one for each id."""
        if self.vocab_shard is None:
            return F.embedding(tokens, table)
        index = tokens - self.vocab_shard.start
        is_local = (index >= 0) & (index < len(table))
        return F.embedding(index.where(is_local, 0), table).masked_fill(~is_local[..., None], 0)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        copy_to_shard(self.weight, normal_init(shard_slice(self.weight).shape, std, generator))

    def forward(self, input: Tensor) -> Tensor:
        return self.embed(input) if self.update is None else self.update(self, input)
