"""Gated short convolution of LFM2."""

import torch
from torch import Tensor

from tunekit.models.forward_context import ForwardContext
from tunekit.models.linear import Linear
from tunekit.models.recurrent import CausalConv1d, RecurrentMixer, RecurrentState
from tunekit.models.spec import ShortConv


class GatedConvolution(RecurrentMixer):
    """out(c * conv(b * x)), where b, c and x are projections of the input."""

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
