"""Gated delta net: linear attention with a state of fixed size."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tunekit.kernels.gated_delta_rule import gated_delta_rule
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.models.forward_context import ForwardContext
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.models.norm import RMSNorm
from tunekit.models.recurrent import CausalConv1d, RecurrentMixer, RecurrentState, token_mask
from tunekit.models.spec import DeltaNet


class DeltaProjections(NamedTuple):
    """Projections of (B, S) tokens: convolution input, output gate, write strength, and decay."""

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


class GatedDeltaNet(RecurrentMixer):
    """Projections, short convolution, gated delta rule, and gated RMS norm (arXiv:2412.06464)."""

    def __init__(self, dim: int, spec: DeltaNet) -> None:
        super().__init__()
        self.spec = spec
        self.widths = [spec.k_heads * spec.k_dim, spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim]
        qkv, v = sum(self.widths), self.widths[-1]
        if spec.grouped:
            self.in_proj_qkvz = Linear(dim, qkv + v, bias=False)
            self.in_proj_ba = Linear(dim, 2 * spec.v_heads, bias=False)
        else:
            self.in_proj_qkv, self.in_proj_z = Linear(dim, qkv, bias=False), Linear(dim, v, bias=False)
            self.in_proj_b, self.in_proj_a = (Linear(dim, spec.v_heads, bias=False) for _ in range(2))
        self.conv1d = CausalConv1d(qkv, spec.conv)
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(spec.v_heads)) for _ in range(2))
        self.norm = RMSNorm(spec.v_dim, spec.norm)
        self.out_proj = Linear(v, dim, bias=False)

    def forward(self, x: Tensor, context: ForwardContext, cache: RecurrentState | None = None) -> Tensor:
        x = context.gather(self.tp_region.enter(x, context.positions.shape))  # the recurrence needs all earlier tokens
        projections = self.project_grouped(x) if self.spec.grouped else self.project(x)
        decay = -self.A_log.float().exp() * F.softplus(projections.a.float() + self.dt_bias.float())
        beta = projections.b.float().sigmoid()
        if cache is not None:
            y = self.advance(projections.qkv, decay, beta, context, cache)
        else:
            # Intermediate tensors of the rule need eight times the memory of its inputs.
            args = projections.qkv, decay, beta, context.layout
            y = checkpoint(self.mix, *args, use_reentrant=False, preserve_rng_state=False)
        y = self.norm(y).float() * F.silu(projections.z.float()).view_as(y)
        return self.tp_region.leave(context.cp_sharding.local_tokens(self.out_proj(y.type_as(x).flatten(-2))))

    def project(self, x: Tensor) -> DeltaProjections:
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        return DeltaProjections(*shared_input_linears(layers, x))

    def project_grouped(self, x: Tensor) -> DeltaProjections:
        """Projections from fused layers whose outputs are grouped by key head."""
        s, repeat = self.spec, self.spec.v_heads // self.spec.k_heads
        sizes = [s.k_dim, s.k_dim, repeat * s.v_dim, repeat * s.v_dim]
        outputs = shared_input_linears((self.in_proj_qkvz, self.in_proj_ba), x)
        qkvz, ba = (y.unflatten(-1, (s.k_heads, -1)) for y in outputs)
        (q, k, v, z), (b, a) = qkvz.split(sizes, dim=-1), ba.chunk(2, dim=-1)
        q, k, v, z, b, a = (y.flatten(-2) for y in (q, k, v, z, b, a))
        return DeltaProjections(torch.cat([q, k, v], dim=-1), z, b, a)

    def mix(self, qkv: Tensor, decay: Tensor, beta: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Outputs (B, S, H, V) for complete rows, or for the documents in them."""
        return gated_delta_rule(*self.split_heads(self.conv1d(qkv, layout)), decay, beta, layout)[0]

    def advance(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, context: ForwardContext, cache: RecurrentState
    ) -> Tensor:
        """Outputs of the next tokens of each row; updates the cache."""
        if not context.is_single_token:  # padding neither decays a state nor writes to it
            is_token = token_mask(qkv, context)
            decay, beta = decay * is_token, beta * is_token
        qkv_heads = self.split_heads(self.conv1d.advance(qkv, context, cache))
        y, states = gated_delta_rule(*qkv_heads, decay, beta, state=cache.states)
        cache.states.copy_(states)  # in place, because a captured graph has fixed addresses
        return y

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, S, heads, dim)."""
        q, k, v = qkv.split(self.widths, dim=-1)
        s = self.spec
        return q.unflatten(-1, (-1, s.k_dim)), k.unflatten(-1, (-1, s.k_dim)), v.unflatten(-1, (-1, s.v_dim))

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> RecurrentState:
        """Empty state. Its size does not depend on `slots`."""
        s = self.spec
        tail = torch.zeros(batch, s.conv - 1, sum(self.widths), dtype=dtype, device=device)
        return RecurrentState(tail, torch.zeros(batch, s.v_heads, s.k_dim, s.v_dim, device=device))

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Draw decays that differ between heads, as in Mamba 2 (arXiv:2405.21060)."""
        decays = torch.empty(self.A_log.shape).uniform_(0.01, 16, generator=generator)
        self.weight_storage.copy(self.A_log, decays.log())
        nn.init.ones_(self.dt_bias)
