"""One decoder for every family: reads a DecoderSpec, builds modules, runs them."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tunekit.distributed.collectives import ALONE, NoParallel, VocabShard
from tunekit.distributed.sharding import Shard
from tunekit.kernels import attention_gpu, shared_prefix
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout
from tunekit.models.attention import SelfAttention
from tunekit.models.feed_forward import GatedMLP
from tunekit.models.forward_context import WHOLE, ForwardContext, KVCache, LayerCache, Rows, has_static_shapes
from tunekit.models.gated_delta_net import GatedDeltaNet
from tunekit.models.linear import Embedding, Linear
from tunekit.models.mla import MultiLatentAttention
from tunekit.models.moe import DenseMoEFeedForward, MixtureOfExperts
from tunekit.models.norm import RMSNorm, make_norm
from tunekit.models.per_layer_embedding import PerLayerEmbedding, PerLayerGate
from tunekit.models.rope import rope_tables
from tunekit.models.spec import (
    MLP,
    Attention,
    DecoderSpec,
    DeltaNet,
    DenseMoE,
    LatentAttention,
    Layer,
    LongRopeScaling,
    MoE,
    Rope,
)
from tunekit.models.weight_init import InitMixin

SLOTS = 128  # slots of a cache on a GPU come in multiples of this, as kernels want masks aligned
TIED = "head.weight"  # where the head is the embedding, this name stands for embed.weight

MIXERS: dict[type, Callable[..., Any]] = {
    Attention: SelfAttention,
    LatentAttention: MultiLatentAttention,
    DeltaNet: GatedDeltaNet,
}
FFNS: dict[type, Callable[..., Any]] = {MLP: GatedMLP, MoE: MixtureOfExperts, DenseMoE: DenseMoEFeedForward}


class Block(InitMixin):
    """A mixer and a feed-forward part, each between its norms and beside a residual."""

    layer_scalar: nn.Parameter | None

    def __init__(self, spec: Layer, model: DecoderSpec) -> None:
        super().__init__()
        before, behind = (model.norm if on else None for on in (spec.pre_norm, spec.post_norm))
        self.scale = model.residual_scale
        self.attn_norm = make_norm(model.dim, before)
        self.attn = MIXERS[type(spec.mixer)](model.dim, spec.mixer)
        self.attn_post_norm = make_norm(model.dim, behind)
        self.mlp_norm = make_norm(model.dim, None if isinstance(spec.ffn, DenseMoE) else before)
        self.mlp = FFNS[type(spec.ffn)](model.dim, spec.ffn)
        self.mlp_post_norm = make_norm(model.dim, behind)
        self.token = None if model.per_layer is None else PerLayerGate(model.per_layer, model)
        scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_parameter("layer_scalar", scalar if spec.scaled else None)

    def forward(
        self, x: Tensor, place: ForwardContext, cache: LayerCache | None = None, token: Tensor | None = None
    ) -> Tensor:
        x = self.add(x, self.attn_post_norm(self.attn(self.attn_norm(x), place, cache)))
        x = self.add(x, self.mlp_post_norm(self.mlp(self.mlp_norm(x))))
        x = x if self.token is None else self.token(x, token)
        return x if self.layer_scalar is None else x * self.layer_scalar.to(x.dtype)

    def reset(self, generator: torch.Generator, std: float) -> None:
        """A fresh block is not scaled."""
        if self.layer_scalar is not None:
            nn.init.ones_(self.layer_scalar)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.scale == 1 else x + y * self.scale


class Decoder(nn.Module):
    """Tokens to logits. `through` and `compute` are set by the memory and precision choices."""

    through: Callable[..., Tensor] | None = None  # how a layer is called where gradients are wanted
    flat = False  # show layers all rows as documents of one, whose input has a gradient: they are compiled but once
    compute: torch.dtype | None = None  # dtype of activations and products; None: that of the embedding
    way: NoParallel = ALONE  # of tokens between layers, where ranks share these
    rows: Rows = WHOLE  # which tokens of long rows are for this rank
    compute_device: torch.device | None = None  # where layers run, if weights wait on another device between passes

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab, spec.dim)
        self.per_layer = None if spec.per_layer is None else PerLayerEmbedding(spec.per_layer, spec)
        blocks = nn.ModuleList(Block(layer, spec) for layer in spec.layers)
        self.layers = cast("Iterable[Block]", blocks)  # a ModuleList does not tell what it holds
        self.norm = RMSNorm(spec.dim, spec.norm)
        self.head = Head(spec)
        self.tie()
        self.ropes = self.number_layers()
        # What a checkpoint holds, whatever formats and adapters do to the modules later.
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters(remove_duplicate=False)}
        self.splits: dict[str, tuple[Shard, ...]] = {}  # tensors of which this rank has a part, by name

    def tie(self) -> None:
        """Make a tied head the embedding, again after each move that gives every module tensors of its own."""
        if self.spec.tied:
            self.head.weight = self.embed.weight

    def number_layers(self) -> tuple[tuple[Rope, int], ...]:
        """The distinct rotations of the model: their tables are made once a pass, for all layers."""
        ropes: dict[tuple[Rope, int], int] = {}
        lenders = {layer.mixer.kv_from for layer in self.spec.layers if isinstance(layer.mixer, Attention)}
        for i, layer in enumerate(self.layers):
            layer.attn.number, layer.attn.lends = i, i in lenders
            if layer.attn.rotary is not None:
                layer.attn.turn = ropes.setdefault(layer.attn.rotary, len(ropes))
        return tuple(ropes)

    @property
    def device(self) -> torch.device:
        """Where tokens go, and caches are."""
        return self.embed.weight.device if self.compute_device is None else self.compute_device

    @property
    def chunks(self) -> frozenset[int]:
        """Into how many positions the layers cut what a token sees; 0: not at all."""
        mixers = (layer.mixer for layer in self.spec.layers)
        return frozenset(mixer.chunk or 0 if isinstance(mixer, Attention) else 0 for mixer in mixers)

    @property
    def edges(self) -> frozenset[int]:
        """Lengths beyond which a row turns otherwise from its beginning (LongRoPE): its cache must be made anew."""
        scalings = (rope.scaling for rope, _ in self.ropes)
        return frozenset(scaling.context for scaling in scalings if isinstance(scaling, LongRopeScaling))

    def shares_prefixes(self, length: int) -> bool:
        """Whether documents of up to so many tokens may go on from others' first ones: these do not know what follows,
        and nothing but their keys and values is asked for."""
        return min(self.edges, default=length) >= length and all(layer.attn.prefixes for layer in self.layers)

    def forward(  # noqa: PLR0913 (all that may be known of a pass)
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
        read: "Callable[[Tensor, Head], Tensor] | None" = None,
        lengths: Tensor | None = None,
        part: bool = False,
    ) -> Tensor:
        """Logits (B, S, vocab) of `tokens` (B, S), or scores (B, S, labels).

        `positions` (B, S) count from 0 in each document and `layout` bounds packed documents. `read(hidden, head)`
        replaces the last step, so that a loss need not hold all logits, and runs inside this call, where sharded
        weights are whole. `lengths` (B,) says where padding begins, for the first pass of a cache. With `part`, hidden
        states are those of the tokens that `rows` keeps: ranks that share rows work on the others. Of documents that
        go on from the first tokens of another, as the layout says, positions begin behind these.
        """
        if cache is not None and cache.is_decoding:
            assert positions is not None and tokens.shape[1] == 1
            return self.finish(tokens, cache.decode_place(positions), cache, read)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        assert part or self.rows is WHOLE or not torch.is_grad_enabled(), "ranks that share rows would each count them"
        rows, length = self.rows if part else WHOLE, tokens.shape[1]
        shape = rows.keep(tokens).shape
        before = self.before(tokens, layout, rows)
        if self.flat and cache is None and rows is WHOLE:
            tokens, positions, layout = flattened(tokens, positions, layout)
        prepared = attention_gpu.prepare(layout, tokens.shape, self.chunks, tokens.device)
        whole = (rope_tables(rope, head_dim, positions, layout, lengths) for rope, head_dim in self.ropes)
        rotations = tuple(turn._replace(cos=rows.keep(turn.cos), sin=rows.keep(turn.sin)) for turn in whole)
        tokens, positions = rows.keep(tokens), rows.keep(positions)
        place = ForwardContext(
            positions, layout, lengths, rotations, rows=rows, length=length, before=before, prepared=prepared
        )
        if cache is not None:
            cache.used = tokens.shape[1]
        return self.finish(tokens, place, cache, read, shape)

    def finish(
        self,
        tokens: Tensor,
        place: ForwardContext,
        cache: KVCache | None,
        read: "Callable[[Tensor, Head], Tensor] | None",
        shape: torch.Size | None = None,
    ) -> Tensor:
        """Run the layers, then the head or `read` on hidden states of `shape` (B, S)."""
        shape = tokens.shape if shape is None else shape
        hidden = self.way.enter(self.run(tokens, place, cache), tokens.shape).view(*shape, self.spec.dim)
        return self.head(hidden) if read is None else read(hidden, self.head)

    def begin_decoding(self, cache: KVCache) -> None:
        """Prepare a cache that a first pass has filled for passes of one token."""
        slots = torch.arange(cache.num_slots, device=self.device)[:, None]
        cache.begin_decoding(tuple(rope_tables(rope, head_dim, slots) for rope, head_dim in self.ropes))

    def before(
        self, tokens: Tensor, layout: SequenceLayout | None, rows: Rows
    ) -> shared_prefix.SharedPrefixKV | shared_prefix.PrefixIndex | None:
        """What documents see before their own tokens, in the form in which attention asks for it."""
        if layout is None or layout.prefixes is None:
            return None
        assert self.shares_prefixes(0), "a state does not go on from another"
        if rows is WHOLE:
            return shared_prefix.prefix_keys(layout, tokens.device)
        return shared_prefix.PrefixIndex(*map(rows.keep, shared_prefix.token_prefix_index(layout, tokens)))

    def run(self, tokens: Tensor, place: ForwardContext, cache: KVCache | None) -> Tensor:
        """Hidden states (B, S, dim) behind the last norm, of the tokens that are kept here between layers."""
        x = self.embed(tokens)
        x = self.way.leave(x if self.compute is None else x.to(self.compute))
        x = x if self.spec.embed_scale == 1 else x * torch.tensor(self.spec.embed_scale, dtype=x.dtype)
        if self.flat and torch.is_grad_enabled():
            x.requires_grad_()
        own = [None] * len(self.spec.layers) if self.per_layer is None else self.per_layer(self.way.keep(tokens), x)
        for i, layer in enumerate(self.layers):
            if self.through is not None and torch.is_grad_enabled():
                x = self.through(layer, x, place, None, own[i])
            else:
                x = layer(x, place, None if cache is None else cache.layers[i], own[i])
        return self.norm(x)

    def cache(self, batch: int, slots: int) -> KVCache:
        """Empty room for `slots` positions of `batch` rows."""
        dtype, device = self.compute or self.embed.weight.dtype, self.device
        if has_static_shapes(device):
            slots = -(-slots // SLOTS) * SLOTS
        return KVCache([layer.attn.cache(batch, slots, dtype, device) for layer in self.layers], slots)


def flattened(
    tokens: Tensor, positions: Tensor, layout: SequenceLayout | None
) -> tuple[Tensor, Tensor, SequenceLayout]:
    """Rows (B, S) as one (1, B * S), and the bounds of the documents in it."""
    layout = rows_layout(*tokens.shape) if layout is None else layout
    return tokens.reshape(1, -1), positions.reshape(1, -1), layout


class Head(Linear):
    """Hidden states to logits, scaled and capped where the family does so, or to scores."""

    share: VocabShard | None = None  # ids whose logits are made here; others make the rest

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec.dim, spec.outputs, bias=spec.score is not None and spec.score.bias)
        self.scale, self.softcap = spec.logit_scale, spec.logit_softcap

    @property
    def plain(self) -> bool:
        """Whether `raw(x)` is x W^T and nothing else."""
        return self.update is None and self.bias is None

    def forward(self, input: Tensor) -> Tensor:
        logits = self.raw(input)
        return self.finish(logits if self.share is None else self.share.whole(logits))

    def raw(self, x: Tensor) -> Tensor:
        """The product alone, which a loss scales and caps itself, of the ids that are here."""
        return super().forward(x)

    def finish(self, logits: Tensor) -> Tensor:
        """What a product gave, scaled and capped."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap
