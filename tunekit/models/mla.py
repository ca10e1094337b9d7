"""DeepSeek's latent attention: keys and values of all heads from one small vector a token."""

import torch
from torch import Tensor, nn

from tunekit.distributed.collectives import NO_PARALLEL, NoParallel
from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.rope import RopeTables, apply_rope
from tunekit.models.forward_context import ForwardContext, LayerKVCache
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.models.norm import RMSNorm
from tunekit.models.spec import LatentAttention


class MultiLatentAttention(nn.Module):
    """Attention whose keys and values are made from a latent, beside one rotated key that all heads share."""

    tp_region: NoParallel = NO_PARALLEL  # of tokens into this layer and out of it, where ranks share its heads
    supports_prefixes = True  # a document may go on from the first tokens of another

    def __init__(self, dim: int, spec: LatentAttention) -> None:
        super().__init__()
        self.spec, self.heads = spec, spec.heads
        self.qk_dim = spec.nope_dim + spec.rope_dim  # of queries and keys
        self.params = AttentionParams(self.qk_dim**-0.5 if spec.scale is None else spec.scale)
        self.rope_key = spec.rope, spec.rope_dim
        self.rope_index = 0  # which of the pass's rotations is this layer's; the decoder sets it
        self.layer_index = 0  # of the layer; the decoder sets it
        self.shares_kv = False  # no layer takes keys from here
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
        q, kv = shared_input_linears(
            (self.q_proj if self.spec.q_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa), x
        )
        latent, k_rope = kv.split([self.spec.kv_rank, self.spec.rope_dim], dim=-1)
        rope_table = RopeTables(*context.rope_tables[self.rope_index][:4], last=True)
        q, k_rope_rotated = apply_rope(self.project_queries(q), k_rope[:, :, None], rope_table)
        k, v = self.expand_kv(context.gather(latent), context.gather(k_rope_rotated))
        if cache is not None:
            k, v = cache.add(k, v, context)
        return self.tp_region.leave(
            self.o_proj(context.attend(q, k, v, self.params)[..., : self.spec.v_dim].flatten(-2))
        )

    def project_queries(self, q: Tensor) -> Tensor:
        """Queries (B, S, H, nope + rope), of which the last channels are still to be turned, or what they come from."""
        q = q if self.spec.q_rank is None else self.q_b_proj(self.q_a_norm(q))
        return q.unflatten(-1, (-1, self.qk_dim))

    def expand_kv(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, S, H, nope + rope) and values (B, S, H, v) from the latent and the key that all heads share."""
        spec = self.spec
        kv = self.kv_b_proj(self.kv_a_norm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([spec.nope_dim, spec.v_dim], dim=-1)
        return torch.cat([k_nope, k_rope.expand(-1, -1, self.heads, -1)], dim=-1), v

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> LayerKVCache:
        """Empty room for `slots` positions.

        Keys and values as they are used, and not the latents: small ones would be made large again for every token.
        """
        heads = batch, slots, self.heads
        return LayerKVCache((*heads, self.qk_dim), (*heads, self.spec.v_dim), dtype, device)
