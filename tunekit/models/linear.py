"""Linear layers and the embedding of all models. Quantization replaces their weights; adapters set `update`."""

from collections.abc import Callable, Iterator, Sequence
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.kernels.grouped_mm import grouped_mm
from tunekit.kernels.linear import linear
from tunekit.kernels.lm_head import VocabShard
from tunekit.models.tp_region import ShardGroup
from tunekit.models.weight_init import InitMixin, normal_init
from tunekit.models.weight_map import Shape

Gather = Callable[[Tensor], Tensor]  # for example, the full tensor of a local shard
CAST_CHUNK_NUMEL = 2**25  # weight elements cast at once without gradients; large heads have 30 times as many


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor: the default of `gather` arguments."""
    return tensor


class LinearBase(InitMixin):
    """Weight (out, in) of a layer, or (E, out, in) of experts, and its bias. Both may be local shards."""

    weight: Tensor
    bias: nn.Parameter | None
    is_adaptable = True  # whether adapters may target the layer
    rowwise_mesh: ShardGroup | None = None  # ranks that hold the other inputs; their outputs are summed

    @property
    def effective_bias(self) -> Tensor | None:
        """Bias of this rank. With sharded inputs, only the first rank adds it to the sum."""
        is_first = self.rowwise_mesh is None or self.rowwise_mesh.index == 0
        return self.bias if self.bias is None or is_first else self.bias * 0

    @property
    def shape(self) -> Shape:
        """Shape of the full weight, even if it is sharded."""
        return self.weight_storage.full_shape(self.weight)

    def dequantize(self, gather: Gather = identity) -> Tensor:
        """Full-precision weight. `gather` is applied to each stored tensor first."""
        return gather(self.weight)

    def load_weight(self, weight: Tensor) -> None:
        """Load a full weight from a checkpoint. May take over its memory."""
        self.weight_storage.adopt(self.weight, weight)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Draw a normal weight and zero the bias."""
        self.load_weight(normal_init(self.shape, std, generator))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Linear(nn.Linear, LinearBase):
    """Linear layer that casts its weight to the dtype of the input: master weights may be fp32 and matmuls bf16.

    Quantization overrides the methods that read the weight; an adapter sets `update`. Parameter names stay the same.
    """

    update: "Callable[[Sequence[Linear], Tensor], tuple[Tensor, ...]] | None" = None  # of layers with the same input
    # Set by an adapter, with the names of PEFT; otherwise not defined.
    lora_A: "Linear"  # (rank, in)
    lora_B: "Linear"  # (out, rank)
    lora_A0: Tensor  # initial values of A and B, if their product is not zero
    lora_B0: Tensor
    lora_magnitude_vector: nn.Parameter  # (out,)
    lora_scale: float
    lora_token_rows: nn.Parameter  # (tokens, in), replace rows of a head
    lora_token_ids: Tensor  # (tokens,), ascending
    token_ids: tuple[int, ...] = ()  # the same ids; empty: no rows are replaced
    vocab_shard: VocabShard | None = None  # ids whose logits a head makes here; others make the rest
    colwise_mesh: ShardGroup | None = None  # ranks that hold the other outputs

    def reset_parameters(self) -> None:
        """Do nothing on the meta device, where torch would run its initialization in Python without effect."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def matmul(self, x: Tensor) -> Tensor:
        """x W^T + b: (..., in) to (..., out)."""
        if self.weight.dtype == x.dtype or self.weight.numel() <= CAST_CHUNK_NUMEL or torch.is_grad_enabled():
            return linear(x, self.weight, self.effective_bias)
        chunks = self.weight.split(max(1, CAST_CHUNK_NUMEL // self.in_features))
        y = torch.cat([linear(x, part) for part in chunks], dim=-1)
        return y if self.effective_bias is None else y + self.effective_bias.to(x.dtype)

    @property
    def is_frozen(self) -> bool:
        """Whether the weight is not trained."""
        return not self.weight.requires_grad

    def matmul_backward(self, grad: Tensor, into: Tensor | None = None) -> Tensor:
        """grad W: (N, out) to (N, in), added to `into` if given."""
        weight = self.weight.to(grad.dtype)
        return grad @ weight if into is None else into.addmm_(grad, weight)

    def iter_fp32_rows(self, num_rows: int) -> Iterator[Tensor]:
        """The weight in fp32, `num_rows` rows at a time."""
        return (part.float() for part in self.weight.split(num_rows))

    def forward(self, input: Tensor) -> Tensor:
        return self.matmul(input) if self.update is None else self.update((self,), input)[0]


class GroupedLinear(LinearBase):
    """Linear layers of all experts in one weight, with the same extension points as Linear."""

    update: "Callable[[Sequence[GroupedLinear], Tensor, Tensor], tuple[Tensor, ...]] | None" = None
    lora_A: nn.Parameter  # (E, rank, in)
    lora_B: nn.Parameter  # (E, out, rank)
    lora_scale: float

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.zeros(experts, out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(experts, out_features)) if bias else None)

    def matmul(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x W[e]^T + b[e] of rows (N, in) sorted by expert, with `sizes` (E,) rows per expert: (N, out)."""
        return grouped_mm(x, self.weight, sizes, self.effective_bias)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return self.matmul(x, sizes) if self.update is None else self.update((self,), x, sizes)[0]


def shared_input_linears(layers: Sequence[Linear] | Sequence[GroupedLinear], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Outputs of layers with the same inputs. An adapter that updates all of them reads the inputs once."""
    update: Callable[..., tuple[Tensor, ...]] | None = layers[0].update
    if update is None or not all(is_same_method(layer.update, update) for layer in layers):
        return tuple(layer(*inputs) for layer in layers)
    return update(layers, *inputs)


def is_same_method(a: object, b: object) -> bool:
    """`a == b` for bound methods, which torch.compile in torch 2.11 cannot compare."""
    if not isinstance(a, MethodType) or not isinstance(b, MethodType):
        return a is b
    return a.__self__ is b.__self__ and a.__func__ is b.__func__


class Embedding(nn.Embedding, InitMixin):
    """Token embedding. An adapter may set `update`."""

    update: "Callable[[Embedding, Tensor, torch.dtype | None], Tensor] | None" = None
    lora_embedding_A: nn.Parameter  # (rank, ids)
    lora_embedding_B: nn.Parameter  # (dim, rank)
    lora_scale: float
    lora_token_rows: nn.Parameter  # (tokens, dim), replace rows of the weight
    lora_token_ids: Tensor  # (tokens,), ascending
    token_ids: tuple[int, ...] = ()  # the same ids; empty: no rows are replaced
    vocab_shard: VocabShard | None = None  # ids on this rank

    def reset_parameters(self) -> None:
        """Do nothing: weights are loaded, or drawn by `init_weights`. On the meta device, torch's version loads the
        compiler (1.8 s, 160 MB)."""

    def embed(self, tokens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Token ids (...) to embeddings (..., dim), in the wider of `dtype` and the dtype of the weight."""
        rows = self.lookup(tokens, self.weight)
        return rows if dtype is None else rows.to(torch.promote_types(rows.dtype, dtype))

    def lookup(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of a table (ids, ...) by token id. Ids of other ranks give zeros."""
        if self.vocab_shard is None:
            return F.embedding(tokens, table)
        index = tokens - self.vocab_shard.start
        is_local = (index >= 0) & (index < len(table))
        return F.embedding(index.where(is_local, 0), table).masked_fill(~is_local[..., None], 0)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        self.weight_storage.copy(self.weight, normal_init(self.weight_storage.full_shape(self.weight), std, generator))

    def forward(self, input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Embeddings as in `embed`, with the update of an adapter, which is not rounded to the dtype of the weight."""
        return self.embed(input, dtype) if self.update is None else self.update(self, input, dtype)
