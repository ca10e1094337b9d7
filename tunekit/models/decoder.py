"""One decoder for all families: builds modules from a DecoderSpec and runs them."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.kernels import attention_gpu
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout
from tunekit.models.altup import AltUpBlock, JoinStreams, SplitStreams
from tunekit.models.block import Block
from tunekit.models.feed_forward import Router
from tunekit.models.forward_context import UNSHARDED, ForwardContext, KVCache, SequenceSharding, has_static_shapes
from tunekit.models.linear import Embedding, Linear
from tunekit.models.norm import RMSNorm, make_norm
from tunekit.models.rope import rope_tables
from tunekit.models.router_stats import RouterStats
from tunekit.models.spec import Attention, DecoderSpec, LongRopeScaling, PerLayerInput, Rope
from tunekit.models.tp_region import NO_PARALLEL, NoParallel

SLOT_MULTIPLE = 128  # number of cache slots on a GPU is a multiple of this, because kernels expect aligned masks
TIED = "head.weight"  # alias of embed.weight if the head is tied

HiddenFn = Callable[[Tensor, Tensor, SequenceLayout | None], Tensor]  # tokens, positions, layout -> (B, S, dim)
LayerGraphs = Callable[[HiddenFn, Tensor, Tensor, SequenceLayout | None], Tensor]  # the same result, as a graph


class PerLayerEmbedding(nn.Module):
    """Gemma 3n and 4: vectors of all layers, a second token embedding plus a projection of the first layer's input."""

    def __init__(self, spec: PerLayerInput, model: DecoderSpec) -> None:
        super().__init__()
        self.shape, self.unknown_id = (len(model.layers), spec.dim), spec.unknown_id
        self.embed = Embedding(spec.vocab, len(model.layers) * spec.dim)
        self.proj = Linear(model.dim, len(model.layers) * spec.dim, bias=False)
        self.norm = RMSNorm(spec.dim, model.norm)

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """One (B, S, dim) per layer, from `tokens` (B, S) and the input of the first layer."""
        of_token = self.look_up(tokens, x.dtype).to(x.dtype).unflatten(-1, self.shape) * self.shape[1] ** 0.5
        of_input = self.norm((self.proj(x) * x.shape[-1] ** -0.5).unflatten(-1, self.shape))
        return ((of_input + of_token) * 2**-0.5).unbind(2)

    def look_up(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings (B, S, layers * dim). As in transformers, the row that stands for unknown tokens is not trained by
        them."""
        if self.unknown_id is None:
            return self.embed(tokens, dtype)
        is_known = tokens < self.embed.num_embeddings
        x = self.embed(tokens.where(is_known, self.unknown_id), dtype)
        return torch.where(is_known[..., None], x, x.detach())


class Decoder(nn.Module):
    """Tokens to logits. The memory and precision configs set `layer_call` and `compute_dtype`."""

    layer_call: Callable[..., Tensor] | None = None  # calls a layer when gradients are enabled
    layer_graphs: LayerGraphs | None = None  # runs the layers of training passes as CUDA graphs
    flatten_rows = False  # pass rows to layers as documents of one row that requires grad: compiles each layer once
    compute_dtype: torch.dtype | None = None  # dtype of activations and matmuls; None: that of the embedding
    tp_region: NoParallel = NO_PARALLEL  # tokens between layers, under sequence parallelism
    cp_sharding: SequenceSharding = UNSHARDED  # tokens of each row on this rank
    compute_device: torch.device | None = None  # where layers run, if weights are offloaded
    router_stats: RouterStats | None = None  # of the last pass, if the loss needs them
    trained_ids: tuple[int, ...] = ()  # new tokens, whose embeddings an adapter trains
    neftune_noise_alpha: float | None = None  # scale of the noise on embeddings in training; None: no noise

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab + spec.extra_embeddings, spec.dim)
        self.per_layer = None if spec.per_layer is None else PerLayerEmbedding(spec.per_layer, spec)
        self.split = None if spec.altup is None else SplitStreams(spec.dim, spec.altup)
        block = Block if spec.altup is None else AltUpBlock
        blocks = nn.ModuleList(block(layer, spec) for layer in spec.layers)
        self.layers = cast("Iterable[Block]", blocks)  # a ModuleList is not generic
        self.join = None if spec.altup is None else JoinStreams(spec.dim, spec.altup)
        self.norm = make_norm(spec.dim, spec.norm)
        self.head = Head(spec)
        self.value_head: ValueHead | None = None  # see `add_value_head`
        self.tie()
        self.ropes = self.index_layers()
        # Checkpoint shapes, before quantization and adapters change the modules.
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters(remove_duplicate=False)}
        self.shards: dict[str, tuple[Any, ...]] = {}  # of local TP and EP shards, by name

    def add_value_head(self) -> None:
        """Add a trained value head, which is not part of the checkpoint."""
        self.value_head = ValueHead(self.spec.dim)

    def tie(self) -> None:
        """Share the embedding's weight with a tied head. Call again after each operation that replaces parameters."""
        if self.spec.tie_word_embeddings:
            self.head.weight = self.embed.weight
            if self.head.token_ids:
                self.head.lora_token_rows = self.embed.lora_token_rows

    def index_layers(self) -> tuple[tuple[Rope, int], ...]:
        """Number the layers and return the distinct RoPE settings: each table is computed once per forward pass."""
        ropes: dict[tuple[Rope, int], int] = {}
        kv_sources = {layer.mixer.kv_shared_layer for layer in self.spec.layers if isinstance(layer.mixer, Attention)}
        for i, layer in enumerate(self.layers):
            layer.attn.layer_index, layer.attn.shares_kv = i, i in kv_sources
            if layer.attn.rope_key is not None:
                layer.attn.rope_index = ropes.setdefault(layer.attn.rope_key, len(ropes))
        return tuple(ropes)

    @property
    def device(self) -> torch.device:
        """Device of input tokens and caches."""
        return self.embed.weight.device if self.compute_device is None else self.compute_device

    @property
    def chunk_sizes(self) -> frozenset[int]:
        """Attention chunk sizes of all layers; 0 for layers without chunks."""
        mixers = (layer.mixer for layer in self.spec.layers)
        return frozenset(mixer.chunk or 0 if isinstance(mixer, Attention) else 0 for mixer in mixers)

    @property
    def rope_switch_lengths(self) -> frozenset[int]:
        """Lengths above which LongRoPE uses other frequencies for the whole row: the cache must be recomputed."""
        scalings = (rope.scaling for rope, _ in self.ropes)
        return frozenset(scaling.context for scaling in scalings if isinstance(scaling, LongRopeScaling))

    def shares_prefixes(self, length: int) -> bool:
        """Whether documents of up to `length` tokens can reuse the keys and values of a shared prefix."""
        return min(self.rope_switch_lengths, default=length) >= length and all(
            layer.attn.supports_prefixes for layer in self.layers
        )

    def forward(  # noqa: PLR0913
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
        head_fn: "Callable[[Tensor, Head], Tensor] | None" = None,
        lengths: Tensor | None = None,
        sharded: bool = False,
    ) -> Tensor:
        """Logits (B, S, vocab) of `tokens` (B, S), or scores (B, S, labels).

        `positions` (B, S) start at 0 in each document, or after the shared prefix of its document; `layout` has the
        bounds of packed documents. `head_fn(hidden, head)` replaces the head, so that a loss does not need all logits
        at once; it runs inside this call, where sharded weights are gathered. `lengths` (B,) are the row lengths
        without padding, for passes that fill a cache. With `sharded`, hidden states are those of the tokens of this
        context parallel rank.
        """
        if cache is not None and cache.is_decoding:
            assert positions is not None
            hidden = self.run_with_context(tokens, cache.decode_context(positions, lengths), cache, tokens.shape)
            return self.head(hidden) if head_fn is None else head_fn(hidden, self.head)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        assert sharded or self.cp_sharding is UNSHARDED or not torch.is_grad_enabled(), (
            "context parallel ranks would count each token several times"
        )
        if self.layer_graphs is not None and cache is None and torch.is_grad_enabled():
            hidden = self.layer_graphs(self.run_layers, tokens, positions, layout)
        else:
            hidden = self.run_layers(tokens, positions, layout, cache, lengths, sharded)
        return self.head(hidden) if head_fn is None else head_fn(hidden, self.head)

    def run_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
        lengths: Tensor | None = None,
        sharded: bool = False,
    ) -> Tensor:
        """Hidden states (B, S, dim) of the tokens of this rank. See `forward`."""
        sharding, length = self.cp_sharding if sharded else UNSHARDED, tokens.shape[1]
        shape = sharding.local_tokens(tokens).shape
        key_index = None
        if layout is not None and layout.prefixes is not None:
            assert self.shares_prefixes(0), "recurrent states of prefixes cannot be shared"
            key_index = layout.key_index(tokens.device) if sharding is UNSHARDED else None
        if self.flatten_rows and cache is None and sharding is UNSHARDED:
            tokens, positions, layout = flatten_to_one_row(tokens, positions, layout)
        context = self.make_context(tokens, positions, layout, lengths, sharding)
        context.row_length, context.key_index = length, key_index
        tokens = sharding.local_tokens(tokens)
        if cache is not None:
            cache.cache_length = tokens.shape[1]
        return self.run_with_context(tokens, context, cache, shape)

    def make_context(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: SequenceLayout | None,
        lengths: Tensor | None,
        sharding: SequenceSharding,
    ) -> ForwardContext:
        """RoPE tables, positions and bounds for the layers, of the tokens of this rank."""
        prepared = attention_gpu.prepare_layout(layout, tokens.shape, self.chunk_sizes, tokens.device)
        full_tables = (rope_tables(rope, head_dim, positions, layout, lengths) for rope, head_dim in self.ropes)
        local = sharding.local_tokens
        tables = tuple(table._replace(cos=local(table.cos), sin=local(table.sin)) for table in full_tables)
        positions = sharding.local_tokens(positions)
        return ForwardContext(positions, layout, lengths, tables, cp_sharding=sharding, prepared_layout=prepared)

    def run_with_context(
        self, tokens: Tensor, context: ForwardContext, cache: KVCache | None, shape: torch.Size
    ) -> Tensor:
        """Hidden states of `shape` (B, S), and dim."""
        hidden = self.tp_region.enter(self.forward_layers(tokens, context, cache), tokens.shape)
        return hidden.view(*shape, self.spec.dim)

    def begin_decoding(self, cache: KVCache) -> None:
        """Prepare a cache for single-token passes after the prefill pass."""
        slots = torch.arange(cache.num_slots, device=self.device)[:, None]
        cache.begin_decoding(tuple(rope_tables(rope, head_dim, slots) for rope, head_dim in self.ropes))

    def forward_layers(self, tokens: Tensor, context: ForwardContext, cache: KVCache | None) -> Tensor:
        """Hidden states (B, S, dim) after the final norm, of the tokens that this rank holds between layers."""
        x = self.embed(tokens, self.compute_dtype)
        x = self.tp_region.leave(x if self.compute_dtype is None else x.to(self.compute_dtype))
        if self.neftune_noise_alpha is not None and self.training and torch.is_grad_enabled():
            x = x + self.draw_noise(tokens, self.neftune_noise_alpha / (context.row_length * self.spec.dim) ** 0.5, x)
        x = x if self.spec.embed_scale == 1 else x * torch.tensor(self.spec.embed_scale, dtype=x.dtype)
        if self.flatten_rows and torch.is_grad_enabled():
            x.requires_grad_()
        layer_inputs = [None] * len(self.spec.layers)
        if self.per_layer is not None:
            layer_inputs = self.per_layer(self.tp_region.local_tokens(tokens), x)
        x = x if self.split is None else self.split(x)
        for i, layer in enumerate(self.layers):
            if self.layer_call is not None and torch.is_grad_enabled():
                x = self.layer_call(layer, x, context, None, layer_inputs[i])
            else:
                x = layer(x, context, None if cache is None else cache.layers[i], layer_inputs[i])
        return self.norm(x if self.join is None else self.join(x))

    def record_routers(self) -> None:
        """Let all routers add the tokens of training passes to `router_stats`."""
        self.router_stats = RouterStats()
        for module in self.modules():
            if isinstance(module, Router):
                module.stats = self.router_stats

    def draw_noise(self, tokens: Tensor, bound: float, like: Tensor) -> Tensor:
        """Uniform noise in [-bound, bound] for the local tokens. TP ranks draw the same, each for all tokens."""
        noise = torch.empty(*tokens.shape, self.spec.dim, dtype=like.dtype, device=like.device).uniform_(-bound, bound)
        return self.tp_region.local_tokens(noise)

    def make_cache(self, batch: int, slots: int) -> KVCache:
        """Empty cache for `slots` positions of `batch` rows."""
        dtype, device = self.compute_dtype or self.embed.weight.dtype, self.device
        if has_static_shapes(device):
            slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
        return KVCache([layer.attn.make_cache(batch, slots, dtype, device) for layer in self.layers], slots)


def flatten_to_one_row(
    tokens: Tensor, positions: Tensor, layout: SequenceLayout | None
) -> tuple[Tensor, Tensor, SequenceLayout]:
    """Rows (B, S) as one row (1, B * S), and the bounds of the documents in it."""
    layout = rows_layout(*tokens.shape) if layout is None else layout
    return tokens.reshape(1, -1), positions.reshape(1, -1), layout


class Head(Linear):
    """Hidden states to logits, with the family's scaling and soft cap, or to scores."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec.dim, spec.outputs, bias=spec.score is not None and spec.score.bias)
        self.scale, self.softcap = spec.logit_scale, spec.logit_softcap

    @property
    def is_plain_linear(self) -> bool:
        """Whether `raw_logits(x)` is x W^T and nothing else."""
        return self.update is None and self.bias is None

    def forward(self, input: Tensor) -> Tensor:
        logits = self.raw_logits(input)
        return self.scale_logits(logits if self.vocab_shard is None else self.vocab_shard.all_gather(logits))

    def raw_logits(self, x: Tensor) -> Tensor:
        """Logits of the local vocabulary shard, without scaling and soft cap."""
        return super().forward(x)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Apply the scaling and soft cap of the family."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


class ValueHead(nn.Module):
    """Hidden states to estimates of the rewards that follow, next to the language model head. They are 0 at first."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim, device="meta"))
        self.bias = nn.Parameter(torch.empty(1, device="meta"))

    def init_weights(self) -> None:
        """Set all weights to 0."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, region: NoParallel = NO_PARALLEL) -> Tensor:
        """Values (N,) in fp32 of hidden states (N, dim). Gradients are those of one rank of a tensor parallel region,
        whose ranks add them up."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)
        return region.all_reduce_sum(values if region.index == 0 else values * 0)
