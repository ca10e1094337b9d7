"""Mixers with a state of fixed size: base class, generation state, causal convolution, and gated convolution (LFM2)."""

import torch
from torch import Tensor, nn

from tunekit.kernels.gated_delta_rule import short_convolution
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.models.forward_context import ForwardContext
from tunekit.models.linear import Linear
from tunekit.models.spec import ShortConv
from tunekit.models.tp_region import NO_PARALLEL, NoParallel
from tunekit.models.weight_init import InitMixin, normal_init


class RecurrentState:
    """Generation state: the last inputs (B, K - 1, C) of the convolution, and the recurrent states (B, ...) in fp32."""

    def __init__(self, tail: Tensor, states: Tensor) -> None:
        self.tail, self.states = tail, states

    def view_rows(self, start: int, stop: int) -> "RecurrentState":
        return RecurrentState(self.tail[start:stop], self.states[start:stop])

    def copy_rows(self, source: Tensor, target: Tensor, num_slots: int) -> None:
        for x in (self.tail, self.states):
            x[target] = x[source]

    def clear(self) -> None:
        self.tail.zero_()
        self.states.zero_()


class RecurrentMixer(InitMixin):
    """Mixer without keys and values, which every tensor parallel rank computes in full."""

    rope_key = None  # no position embeddings
    rope_index: int | None = None
    layer_index, shares_kv = 0, False  # no keys and values to share
    supports_prefixes = False  # states of a prefix cannot be shared
    tp_region: NoParallel = NO_PARALLEL  # communication under tensor parallelism

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """No direct parameters."""


def token_mask(x: Tensor, context: ForwardContext) -> Tensor:
    """Which tokens of padded rows (B, S, C) are no padding, (B, S, 1)."""
    return torch.arange(x.shape[1], device=x.device)[:, None] < row_lengths(x, context)[:, None, None]


def row_lengths(x: Tensor, context: ForwardContext) -> Tensor:
    """Number of tokens (B,) of padded rows (B, S, C)."""
    return x.new_full((len(x),), x.shape[1], dtype=torch.long) if context.lengths is None else context.lengths


class CausalConv1d(InitMixin):
    """Depthwise convolution over time: weights (C, 1, K), with the tap of the current token last."""

    bias: nn.Parameter | None

    def __init__(self, channels: int, width: int, bias: bool = False, silu: bool = True) -> None:
        super().__init__()
        self.silu = silu  # apply SiLU to the outputs
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)

    def forward(self, x: Tensor, layout: SequenceLayout | None = None, previous: Tensor | None = None) -> Tensor:
        """Outputs (B, S, C) for complete rows, for the documents in them, or after `previous` (B, K - 1, C) inputs."""
        return short_convolution(x, self.weight.squeeze(1), layout, previous, self.bias, self.silu)

    def advance(self, x: Tensor, context: ForwardContext, cache: RecurrentState) -> Tensor:
        """Outputs of the next tokens of each row. The cache keeps the last inputs before the padding.

        It is updated in place, because a captured graph has fixed addresses.
        """
        y, inputs = self(x, previous=cache.tail), torch.cat([cache.tail, x], dim=1)
        if context.is_single_token:
            cache.tail.copy_(inputs[:, 1:])
        else:
            last = row_lengths(x, context)[:, None] + torch.arange(cache.tail.shape[1], device=x.device)
            cache.tail.copy_(inputs.take_along_dim(last[..., None], dim=1))
        return y

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Draw normal weights and zero the bias."""
        self.weight_storage.copy(self.weight, normal_init(self.weight.shape, std, generator))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class GatedConvolution(RecurrentMixer):
    """Gated short convolution of LFM2: out(c * conv(b * x)), where b, c and x are projections of the input."""

    def __init__(self, dim: int, spec: ShortConv) -> None:
        super().__init__()
        self.in_proj = Linear(dim, 3 * dim, bias=spec.bias)
        self.conv = CausalConv1d(dim, spec.conv, spec.bias, silu=False)
        self.out_proj = Linear(dim, dim, bias=spec.bias)

    def forward(self, x: Tensor, context: ForwardContext, cache: RecurrentState | None = None) -> Tensor:
        x = context.gather(self.tp_region.enter(x, context.positions.shape))  # the convolution needs earlier tokens
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        x = b * x
        y = self.conv(x, context.layout) if cache is None else self.conv.advance(x, context, cache)
        return self.tp_region.leave(context.cp_sharding.local_tokens(self.out_proj(c * y)))

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> RecurrentState:
        """Last inputs of the convolution. Their number does not depend on `slots`."""
        channels, _, width = self.conv.weight.shape
        tail = torch.zeros(batch, width - 1, channels, dtype=dtype, device=device)
        return RecurrentState(tail, torch.zeros(batch, 0, device=device))
