"""Multi-head latent attention (MLA) of DeepSeek: keys and values are expanded from one latent per token."""

import torch
from torch import Tensor, nn

from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.rope import RopeTables, apply_rope
from tunekit.models.forward_context import ForwardContext, LayerKVCache
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.models.norm import RMSNorm
from tunekit.models.spec import LatentAttention
from tunekit.models.tp_region import NO_PARALLEL, NoParallel


class MultiLatentAttention(nn.Module):
    """Attention with keys and values from a latent vector, and one RoPE key shared by all heads (arXiv:2405.04434)."""

    tp_region: NoParallel = NO_PARALLEL  # communication with ranks that hold other heads
    supports_prefixes = True  # documents can share the keys and values of a prefix

    def __init__(self, dim: int, spec: LatentAttention) -> None:
        super().__init__()
        self.spec, self.heads = spec, spec.heads
        self.qk_dim = spec.nope_dim + spec.rope_dim
        self.params = AttentionParams(self.qk_dim**-0.5 if spec.scale is None else spec.scale)
        self.rope_key = spec.rope, spec.rope_dim
        self.rope_index = 0  # into the context's rope_tables; set by the decoder
        self.layer_index = 0  # set by the decoder
        self.shares_kv = False  # no layer reuses these keys
        if spec.q_rank is None:
            self.q_proj = Linear(dim, spec.heads * self.qk_dim, bias=False)
        else:
            self.q_a_proj = Linear(dim, spec.q_rank, bias=spec.bias)
            self.q_a_norm = RMSNorm(spec.q_rank, spec.norm)
            self.q_b_proj = Linear(spec.q_rank, spec.heads * self.qk_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(dim, spec.kv_rank + spec.rope_dim, bias=spec.bias)
        self.kv_a_norm = RMSNorm(spec.kv_rank, spec.norm)
        self.kv_b_proj = Linear(spec.kv_rank, spec.heads * (spec.nope_dim + spec.v_dim), bias=False)
        self.o_proj = Linear(spec.heads * spec.v_dim, dim, bias=spec.bias)

    def forward(self, x: Tensor, context: ForwardContext, cache: LayerKVCache | None = None) -> Tensor:
        x = self.tp_region.enter(x, context.positions.shape)
        q_layer = self.q_proj if self.spec.q_rank is None else self.q_a_proj
        q, kv = shared_input_linears((q_layer, self.kv_a_proj_with_mqa), x)
        latent, k_rope = kv.split([self.spec.kv_rank, self.spec.rope_dim], dim=-1)
        rope_table = RopeTables(*context.rope_tables[self.rope_index][:4], rotate_last=True)
        q, k_rope_rotated = apply_rope(self.project_queries(q), k_rope[:, :, None], rope_table)
        k, v = self.expand_kv(context.gather(latent), context.gather(k_rope_rotated))
        if cache is not None:
            k, v = cache.add(k, v, context)
        y = context.attend(q, k, v, self.params)[..., : self.spec.v_dim].flatten(-2)
        return self.tp_region.leave(self.o_proj(y))

    def project_queries(self, q: Tensor) -> Tensor:
        """Queries (B, S, H, nope + rope) before RoPE. `q` is the output of q_proj or q_a_proj."""
        q = q if self.spec.q_rank is None else self.q_b_proj(self.q_a_norm(q))
        return q.unflatten(-1, (-1, self.qk_dim))

    def expand_kv(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, S, H, nope + rope) and values (B, S, H, v) from the latent and the shared RoPE key."""
        spec = self.spec
        kv = self.kv_b_proj(self.kv_a_norm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([spec.nope_dim, spec.v_dim], dim=-1)
        return torch.cat([k_nope, k_rope.expand(-1, -1, self.heads, -1)], dim=-1), v

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> LayerKVCache:
        """Empty cache for `slots` positions.

        Stores expanded keys and values instead of latents, which would have to be expanded again for each token.
        """
        heads = batch, slots, self.heads
        return LayerKVCache((*heads, self.qk_dim), (*heads, self.spec.v_dim), dtype, device)
