"""Softmax attention with grouped keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.rope import apply_rope
from tunekit.models.forward_context import ForwardContext, LayerKVCache
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.models.norm import RMSNorm, make_norm
from tunekit.models.spec import Attention, Norm
from tunekit.models.tp_region import NO_PARALLEL, NoParallel
from tunekit.models.weight_init import InitMixin


class SelfAttention(InitMixin):
    """Grouped-query attention, with or without a KV cache."""

    sinks: nn.Parameter | None
    tp_region: NoParallel = NO_PARALLEL  # communication with ranks that hold other heads
    supports_prefixes = True  # documents can share the keys and values of a prefix
    kv_head_slice = slice(None)  # KV heads that the local query heads use

    def __init__(self, dim: int, spec: Attention) -> None:
        super().__init__()
        self.spec, self.kv_heads = spec, spec.kv_heads
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.params = AttentionParams(scale, spec.window, spec.chunk, spec.softcap)
        self.rope_key = None if spec.rope is None else (spec.rope, spec.head_dim)
        self.rope_index: int | None = None  # into the context's rope_tables; set by the decoder
        self.layer_index = 0  # set by the decoder
        self.shares_kv = False  # later layers reuse these keys and values; set by the decoder
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = Linear(dim, q * (2 if spec.output_gate else 1), bias=spec.bias)
        self.q_norm = make_head_norm(spec.heads, spec.head_dim, spec.qk_norm)
        k_norm = spec.qk_norm if spec.kv_shared_layer is None else None
        self.k_norm = make_head_norm(spec.kv_heads, spec.head_dim, k_norm)
        if spec.kv_shared_layer is None:
            self.k_proj = Linear(dim, kv, bias=spec.bias)
            if not spec.attention_k_eq_v:
                self.v_proj = Linear(dim, kv, bias=spec.bias)
            self.v_norm = make_norm(spec.head_dim, spec.v_norm)
        self.o_proj = Linear(q, dim, bias=spec.out_bias)
        self.register_parameter("sinks", nn.Parameter(torch.zeros(spec.heads)) if spec.sinks else None)

    def forward(self, x: Tensor, context: ForwardContext, cache: LayerKVCache | None = None) -> Tensor:
        q, *kv = shared_input_linears(self.input_layers, self.tp_region.enter(x, context.positions.shape))
        q, gate = self.split_gate(q)
        source = self.spec.kv_shared_layer
        k, v = self.split_kv(kv) if source is None else (q[:, :, :0], q)
        q, k = self.apply_rope_and_norm(q, k, context)
        q = self.scale_queries(q, context)
        k, v = self.cached_kv(k, v, context, cache) if source is None else context.shared_kv.get(source)
        y = context.attend(q, k, v, self.params, self.sinks)[..., : self.spec.head_dim].flatten(-2)
        return self.tp_region.leave(self.o_proj(y if gate is None else y * gate.sigmoid()))

    @property
    def input_layers(self) -> list[Linear]:
        """Layers that read the input of the module."""
        if self.spec.kv_shared_layer is not None:
            return [self.q_proj]
        return [self.q_proj, self.k_proj, *([] if self.spec.attention_k_eq_v else [self.v_proj])]

    def split_gate(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries (B, S, H, D), and the output gate (B, S, H * D) if the family has one."""
        q = q.unflatten(-1, (-1, self.spec.head_dim * (2 if self.spec.output_gate else 1)))
        if not self.spec.output_gate:
            return q, None
        q, gate = q.chunk(2, dim=-1)
        return q, gate.flatten(-2)

    def scale_queries(self, q: Tensor, context: ForwardContext) -> Tensor:
        """Apply attention temperature tuning, which scales queries by their position."""
        tuning = self.spec.temperature_tuning
        if tuning is None:
            return q
        step = ((context.positions + tuning.shift) / tuning.floor_scale).floor()
        return (q * (1 + tuning.beta * step.log1p())[..., None, None]).type_as(q)

    def split_kv(self, projections: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, H_kv, D) of the input tokens."""
        k, *v = (y.unflatten(-1, (-1, self.spec.head_dim))[:, :, self.kv_head_slice] for y in projections)
        return k, self.v_norm(k if self.spec.attention_k_eq_v else v[0])

    def cached_kv(
        self, k: Tensor, v: Tensor, context: ForwardContext, cache: LayerKVCache | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, H_kv, D): of the input rows, or of all tokens in the cache."""
        kv = (context.gather(k), context.gather(v)) if cache is None else cache.add(k, v, context)
        if self.shares_kv:
            context.shared_kv.add(self.layer_index, kv)
        return kv

    def apply_rope_and_norm(self, q: Tensor, k: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Apply RoPE and the QK norms in the order of the family."""
        if self.rope_index is None:
            return self.q_norm(q), self.k_norm(k)
        rotation = context.rope_tables[self.rope_index]
        if not self.spec.norm_after_rope:
            return apply_rope(self.q_norm(q), self.k_norm(k), rotation)
        q, k = apply_rope(q, k, rotation)
        return self.q_norm(q), self.k_norm(k)

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> LayerKVCache:
        """Empty cache for `slots` positions."""
        shape = (batch, slots if self.spec.kv_shared_layer is None else 0, self.kv_heads, self.spec.head_dim)
        return LayerKVCache(shape, shape, dtype, device)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Zero the sinks: exp(0) in the softmax denominator."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)


class AllHeadNorm(RMSNorm):
    """One RMS norm over all heads of (B, S, H, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


def make_head_norm(heads: int, head_dim: int, spec: Norm | None) -> nn.Module:
    """QK norm over each head, or over all heads."""
    if spec is not None and spec.over_all_heads:
        return AllHeadNorm(heads * head_dim, spec)
    return make_norm(head_dim, spec)
