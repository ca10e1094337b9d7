"""One decoder for every family: reads a DecoderSpec, builds modules, runs them."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tunekit.kernels.attention import attend, attend_cached
from tunekit.kernels.glu import gated
from tunekit.kernels.norm import rms_norm
from tunekit.models.linear import Embedding, Linear
from tunekit.models.rope import Rotation, rotate, tables
from tunekit.models.spec import MLP, Attention, DecoderSpec, Layer, Norm, Rope

TIED = "head.weight"  # where the head is the embedding, this name stands for embed.weight


class RMSNorm(nn.Module):
    def __init__(self, dim: int, spec: Norm) -> None:
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class KV:
    """Keys and values of one layer in generation, (B, slots, H_kv, D) each; the index of a slot is its position."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Put (B, S, H_kv, D) at `positions` (B, S)."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[rows, positions] = k
        self.v[rows, positions] = v


class Cache:
    """What generation keeps between passes. Short rows are padded on the right, and overwrite the padding later."""

    def __init__(self, layers: list[KV]) -> None:
        self.layers = layers
        self.used = 0  # slots that any row may have written


class Place(NamedTuple):
    """What all layers of one pass share: where the tokens are."""

    positions: Tensor  # (B, S)
    offsets: Tensor | None  # bounds of packed documents
    rotations: tuple[Rotation, ...]  # one for each distinct Rope of the model
    used: int = 0  # slots of the cache to look at


class SelfAttention(nn.Module):
    """Grouped-query attention, with or without a cache."""

    def __init__(self, dim: int, spec: Attention) -> None:
        super().__init__()
        self.spec = spec
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.turn: int | None = None  # which of the pass's rotations is this layer's; the decoder sets it
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = Linear(dim, q, bias=spec.bias)
        self.k_proj = Linear(dim, kv, bias=spec.bias)
        self.v_proj = Linear(dim, kv, bias=spec.bias)
        self.o_proj = Linear(q, dim, bias=spec.out_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.qk_norm) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.qk_norm) if spec.qk_norm else nn.Identity()

    def forward(self, x: Tensor, place: Place, cache: KV | None = None) -> Tensor:
        spec, heads = self.spec, (*x.shape[:2], -1, self.spec.head_dim)
        q, k = self.q_norm(self.q_proj(x).view(heads)), self.k_norm(self.k_proj(x).view(heads))
        v = self.v_proj(x).view(heads)
        if self.turn is not None:
            q, k = rotate(q, place.rotations[self.turn]), rotate(k, place.rotations[self.turn])
        if cache is None:
            y = attend(q, k, v, self.scale, spec.window, place.offsets)
        else:
            y = self.cached(q, k, v, place, cache)
        return self.o_proj(y.flatten(-2))

    def cached(self, q: Tensor, k: Tensor, v: Tensor, place: Place, cache: KV) -> Tensor:
        cache.write(k, v, place.positions)
        if place.used == q.shape[1]:  # the first pass: nothing is in the cache but what came now
            return attend(q, k, v, self.scale, self.spec.window)
        seen = cache.k[:, : place.used], cache.v[:, : place.used]
        return attend_cached(q, *seen, place.positions, self.scale, self.spec.window)

    def cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> KV:
        """Empty room for `slots` positions."""
        return KV((batch, slots, self.spec.kv_heads, self.spec.head_dim), dtype, device)


class FeedForward(nn.Module):
    def __init__(self, dim: int, spec: MLP) -> None:
        super().__init__()
        self.act = spec.act
        self.gate_proj = Linear(dim, spec.hidden, bias=spec.bias)
        self.up_proj = Linear(dim, spec.hidden, bias=spec.bias)
        self.down_proj = Linear(spec.hidden, dim, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.act, self.gate_proj(x), self.up_proj(x)))


MIXERS = {Attention: SelfAttention}
FFNS = {MLP: FeedForward}


class Block(nn.Module):
    def __init__(self, spec: Layer, dim: int, norm: Norm) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(dim, norm)
        self.attn = MIXERS[type(spec.mixer)](dim, spec.mixer)
        self.mlp_norm = RMSNorm(dim, norm)
        self.mlp = FFNS[type(spec.ffn)](dim, spec.ffn)

    def forward(self, x: Tensor, place: Place, cache: KV | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), place, cache)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens to logits. `recompute` and `compute` are set by the memory and precision choices."""

    recompute = False  # drop the activations of each layer, and compute them again in the backward pass
    compute: torch.dtype | None = None  # dtype of activations and products; None: that of the embedding

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab, spec.dim)
        blocks = nn.ModuleList(Block(layer, spec.dim, spec.norm) for layer in spec.layers)
        self.layers = cast("Iterable[Block]", blocks)  # a ModuleList does not tell what it holds
        self.norm = RMSNorm(spec.dim, spec.norm)
        self.head = Linear(spec.dim, spec.vocab, bias=False)
        self.tie()
        self.ropes = self.number_ropes()
        # What a checkpoint holds, whatever formats and adapters do to the modules later.
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters(remove_duplicate=False)}

    def tie(self) -> None:
        """Make a tied head the embedding, again after each move that gives every module tensors of its own."""
        if self.spec.tied:
            self.head.weight = self.embed.weight

    def number_ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The distinct rotations of the model: their tables are made once a pass, for all layers."""
        ropes: dict[tuple[Rope, int], int] = {}
        for layer in self.layers:
            mixer = layer.attn.spec
            if mixer.rope is not None:
                layer.attn.turn = ropes.setdefault((mixer.rope, mixer.head_dim), len(ropes))
        return tuple(ropes)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        offsets: Tensor | None = None,
        cache: Cache | None = None,
        read: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        """Logits (B, S, vocab) of `tokens` (B, S).

        `positions` (B, S) count from 0 in each document and `offsets` bound packed documents. `read(hidden, head)`
        replaces the last step, so that a loss need not hold all logits, and runs inside this call, where sharded
        weights are whole.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        rotations = tuple(tables(rope, head_dim, positions) for rope, head_dim in self.ropes)
        place = Place(positions, offsets, rotations)
        if cache is not None:
            cache.used += tokens.shape[1]
            place = place._replace(used=cache.used)
        hidden = self.run(tokens, place, cache)
        return self.head(hidden) if read is None else read(hidden, self.head)

    def run(self, tokens: Tensor, place: Place, cache: Cache | None) -> Tensor:
        """Hidden states (B, S, dim) behind the last norm."""
        x = self.embed(tokens)
        x = x if self.compute is None else x.to(self.compute)
        for i, layer in enumerate(self.layers):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, place, use_reentrant=False)
            else:
                x = layer(x, place, None if cache is None else cache.layers[i])
        return self.norm(x)

    def cache(self, batch: int, slots: int) -> Cache:
        """Empty room for `slots` positions of `batch` rows."""
        dtype = self.compute or self.embed.weight.dtype
        return Cache([layer.attn.cache(batch, slots, dtype, self.norm.weight.device) for layer in self.layers])
