"""Softmax attention with grouped keys and values, and all that families do to it."""

import torch
from torch import Tensor, nn

from tunekit.kernels.attention import Rule, attend, attend_cached
from tunekit.models.init import Fresh
from tunekit.models.linear import Linear
from tunekit.models.norm import RMSNorm, norm
from tunekit.models.place import KV, Place
from tunekit.models.rope import rotate
from tunekit.models.spec import Attention, Norm


class SelfAttention(Fresh):
    """Grouped-query attention, with or without a cache."""

    sinks: nn.Parameter | None

    def __init__(self, dim: int, spec: Attention) -> None:
        super().__init__()
        self.spec = spec
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.rule = Rule(scale, spec.window, spec.chunk, spec.softcap)
        self.rotary = None if spec.rope is None else (spec.rope, spec.head_dim)
        self.turn: int | None = None  # which of the pass's rotations is this layer's; the decoder sets it
        self.number = 0  # of the layer; the decoder sets it
        self.lends = False  # whether later layers take keys and values from here; the decoder sets it
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = Linear(dim, q * (2 if spec.gated else 1), bias=spec.bias)
        self.q_norm = heads_norm(spec.heads, spec.head_dim, spec.qk_norm)
        if spec.kv_from is None:
            self.k_proj = Linear(dim, kv, bias=spec.bias)
            self.k_norm = heads_norm(spec.kv_heads, spec.head_dim, spec.qk_norm)
            if not spec.k_is_v:
                self.v_proj = Linear(dim, kv, bias=spec.bias)
            self.v_norm = norm(spec.head_dim, spec.v_norm)
        self.o_proj = Linear(q, dim, bias=spec.out_bias)
        self.register_parameter("sinks", nn.Parameter(torch.zeros(spec.heads)) if spec.sinks else None)

    def forward(self, x: Tensor, place: Place, cache: KV | None = None) -> Tensor:
        q, gate = self.queries(x, place)
        k, v = self.keys(x, place, cache) if self.spec.kv_from is None else place.kv[self.spec.kv_from]
        if k.shape[1] == q.shape[1]:  # there is nothing but what came now
            y = attend(q, k, v, self.rule, place.offsets, self.sinks)
        else:
            y = attend_cached(q, k, v, place.positions, self.rule, self.sinks)
        y = y.flatten(-2)
        return self.o_proj(y if gate is None else y * gate.sigmoid())

    def queries(self, x: Tensor, place: Place) -> tuple[Tensor, Tensor | None]:
        """Queries (B, S, H, D) where they stand, and the gate (B, S, H * D) of those that have one."""
        spec, gate = self.spec, None
        q = self.q_proj(x).unflatten(-1, (spec.heads, -1))
        if spec.gated:
            q, gate = q.chunk(2, dim=-1)
            gate = gate.flatten(-2)
        q = self.stand(q, self.q_norm, place)
        if spec.tuning is not None:
            step = ((place.positions + spec.tuning.shift) / spec.tuning.every).floor()
            q = (q * (1 + spec.tuning.beta * step.log1p())[..., None, None]).type_as(q)
        return q, gate

    def keys(self, x: Tensor, place: Place, cache: KV | None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, H_kv, D): of these tokens, or of all that the cache has seen."""
        k = self.k_proj(x).unflatten(-1, (-1, self.spec.head_dim))
        v = self.v_norm(k if self.spec.k_is_v else self.v_proj(x).unflatten(-1, (-1, self.spec.head_dim)))
        kv = self.stand(k, self.k_norm, place), v
        if cache is not None:
            kv = cache.add(*kv, place.positions, place.used)
        if self.lends:
            # When a layer is run again for its gradients, those who took keep what they took.
            place.kv.setdefault(self.number, kv)
        return kv

    def stand(self, x: Tensor, norm: nn.Module, place: Place) -> Tensor:
        """Norm and rotation of queries or keys, in the order of the family."""
        if self.turn is None:
            return norm(x)
        rotation = place.rotations[self.turn]
        return norm(rotate(x, rotation)) if self.spec.norm_after_rope else rotate(norm(x), rotation)

    def cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> KV:
        """Empty room for `slots` positions."""
        shape = (batch, slots if self.spec.kv_from is None else 0, self.spec.kv_heads, self.spec.head_dim)
        return KV(shape, shape, dtype, device)

    def reset(self, generator: torch.Generator, std: float) -> None:
        """A fresh sink takes what a score of zero takes."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)


class AcrossHeads(RMSNorm):
    """One norm over all heads of (B, S, H, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


def heads_norm(heads: int, head_dim: int, spec: Norm | None) -> nn.Module:
    """The norm of queries or keys: over each head, or over all of them."""
    if spec is not None and spec.across_heads:
        return AcrossHeads(heads * head_dim, spec)
    return norm(head_dim, spec)
