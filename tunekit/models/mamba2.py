"""Mamba 2: a convolution and a state space model, alone or in parallel with attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tunekit.kernels.rms_norm import rms_norm
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.state_space import state_space_scan
from tunekit.models.attention import SelfAttention
from tunekit.models.forward_context import ForwardContext, LayerKVCache
from tunekit.models.linear import Linear
from tunekit.models.recurrent import CausalConv1d, RecurrentMixer, RecurrentState, token_mask
from tunekit.models.spec import Mamba2, ParallelMixers
from tunekit.models.weight_init import InitMixin


class Mamba2Mixer(RecurrentMixer):
    """Projection, short convolution, state space model, and gated norm (arXiv:2405.21060)."""

    def __init__(self, dim: int, spec: Mamba2) -> None:
        super().__init__()
        self.spec = spec
        inner, keys = spec.heads * spec.head_dim, spec.groups * spec.state_dim
        self.widths = [inner, keys, keys]  # of the inputs, B and C
        self.in_proj = Linear(dim, 2 * inner + 2 * keys + spec.heads, bias=spec.bias)
        self.conv1d = CausalConv1d(sum(self.widths), spec.conv, spec.conv_bias)
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.zeros(spec.heads)) for _ in range(3))
        self.norm = GatedGroupNorm(inner, spec)
        self.out_proj = Linear(inner, dim, bias=spec.out_bias)
        self.out_proj.is_adaptable = spec.adaptable_out_proj

    def forward(self, x: Tensor, context: ForwardContext, cache: RecurrentState | None = None) -> Tensor:
        x = context.gather(self.tp_region.enter(x, context.positions.shape))  # the recurrence needs all earlier tokens
        z, xbc, dt = self.project(x)
        dt = F.softplus(dt.float() + self.dt_bias.float())
        if cache is not None:
            y = self.advance(xbc, dt, context, cache)
        else:
            # Intermediate tensors of the scan need several times the memory of its inputs.
            y = checkpoint(self.mix, xbc, dt, context.layout, use_reentrant=False, preserve_rng_state=False)
        y = self.out_proj(self.norm(y.flatten(-2), z))
        return self.tp_region.leave(context.cp_sharding.local_tokens(y))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, input of the convolution, and step sizes of the tokens (B, S)."""
        y, sizes = self.in_proj(x), [self.widths[0], *self.widths, self.spec.heads]
        if self.spec.multipliers is not None:
            parts = zip(y.split(sizes, dim=-1), self.spec.multipliers, strict=True)
            y = torch.cat([part * multiplier for part, multiplier in parts], dim=-1)
        z, xbc, dt = y.split([self.widths[0], sum(self.widths), self.spec.heads], dim=-1)
        return z, xbc, dt

    def mix(self, xbc: Tensor, dt: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Outputs (B, S, H, P) for complete rows, or for the documents in them."""
        return self.scan(self.conv1d(xbc, layout), dt, layout=layout)[0]

    def advance(self, xbc: Tensor, dt: Tensor, context: ForwardContext, cache: RecurrentState) -> Tensor:
        """Outputs of the next tokens of each row; updates the cache."""
        if not context.is_single_token:
            dt = dt * token_mask(xbc, context)  # a step of size 0 does not change a state
        y, states = self.scan(self.conv1d.advance(xbc, context, cache), dt, state=cache.states)
        cache.states.copy_(states)  # in place, because a captured graph has fixed addresses
        return y

    def scan(
        self, mixed: Tensor, dt: Tensor, layout: SequenceLayout | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs (B, S, H, P) of the state space model in fp32, and its final states (B, H, N, P)."""
        x, b, c = mixed.split(self.widths, dim=-1)
        x = x.float().unflatten(-1, (self.spec.heads, -1))
        b, c = (y.unflatten(-1, (self.spec.groups, -1)) for y in (b, c))
        decay = -self.A_log.float().exp() * dt
        y, state = state_space_scan(c, b, x * dt[..., None], decay, layout, state)
        return torch.addcmul(y, x, self.D.float()[:, None]), state

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> RecurrentState:
        """Empty state. Its size does not depend on `slots`."""
        s = self.spec
        tail = torch.zeros(batch, s.conv - 1, sum(self.widths), dtype=dtype, device=device)
        return RecurrentState(tail, torch.zeros(batch, s.heads, s.state_dim, s.head_dim, device=device))

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Let decays differ between heads: A is -1, -2, ..."""
        self.weight_storage.copy(self.A_log, torch.arange(1.0, self.spec.heads + 1).log())
        nn.init.ones_(self.dt_bias)
        nn.init.ones_(self.D)


class GatedGroupNorm(InitMixin):
    """SiLU gate and RMS norm over each group of channels, in the order of the family; or only the gate."""

    weight: nn.Parameter | None

    def __init__(self, dim: int, spec: Mamba2) -> None:
        super().__init__()
        self.spec = spec
        self.register_parameter("weight", None if spec.norm is None else nn.Parameter(torch.ones(dim)))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Outputs in the dtype of the gate `z`, from `x` in fp32, both (B, S, dim)."""
        gate = F.silu(z.float())
        if self.weight is None or self.spec.norm is None:
            return (x * gate).type_as(z)
        x = x if self.spec.norm_before_gate else x * gate
        x = rms_norm(x.unflatten(-1, (self.spec.groups, -1)), None, self.spec.norm.eps).flatten(-2)
        if not self.spec.norm.scale_in_fp32:
            return x.type_as(z) * self.weight.to(z.dtype)
        x = x * self.weight.float()
        return (x * gate if self.spec.norm_before_gate else x).type_as(z)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Set the scale to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)


class ParallelState:
    """Generation states of attention and Mamba 2."""

    def __init__(self, attn: LayerKVCache, mamba: RecurrentState) -> None:
        self.attn, self.mamba = attn, mamba

    def view_rows(self, start: int, stop: int) -> "ParallelState":
        return ParallelState(self.attn.view_rows(start, stop), self.mamba.view_rows(start, stop))

    def copy_rows(self, source: Tensor, target: Tensor, num_slots: int) -> None:
        self.attn.copy_rows(source, target, num_slots)
        self.mamba.copy_rows(source, target, num_slots)

    def clear(self) -> None:
        self.attn.clear()
        self.mamba.clear()


class AttentionAndMamba2(RecurrentMixer):
    """Sum of attention and Mamba 2 for the same input, with constant factors on inputs and outputs."""

    def __init__(self, dim: int, spec: ParallelMixers) -> None:
        super().__init__()
        self.spec = spec
        self.attn, self.mamba = SelfAttention(dim, spec.attention), Mamba2Mixer(dim, spec.mamba)
        self.rope_key = self.attn.rope_key

    def forward(self, x: Tensor, context: ForwardContext, cache: ParallelState | None = None) -> Tensor:
        spec, self.attn.rope_index = self.spec, self.rope_index
        attn_cache, mamba_cache = (None, None) if cache is None else (cache.attn, cache.mamba)
        attention = self.attn(x * spec.attention_scales[0], context, attn_cache) * spec.attention_scales[1]
        return self.mamba(x * spec.mamba_scales[0], context, mamba_cache) * spec.mamba_scales[1] + attention

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> ParallelState:
        """Empty cache for `slots` positions."""
        sizes = batch, slots, dtype, device
        return ParallelState(self.attn.make_cache(*sizes), self.mamba.make_cache(*sizes))
