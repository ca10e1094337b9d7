"""Layers of the decoder: a token mixer and a feed-forward layer with norms and residual connections."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunekit.kernels.glu import gated_activation
from tunekit.models.attention import SelfAttention
from tunekit.models.feed_forward import DenseMoEFeedForward, GatedMLP, MixtureOfExperts
from tunekit.models.forward_context import ForwardContext, LayerCache, LayerKVCache
from tunekit.models.gated_delta_net import GatedDeltaNet
from tunekit.models.linear import Linear
from tunekit.models.mamba2 import AttentionAndMamba2, Mamba2Mixer
from tunekit.models.mla import MultiLatentAttention
from tunekit.models.norm import RMSNorm, make_norm
from tunekit.models.recurrent import GatedConvolution, RecurrentMixer
from tunekit.models.spec import (
    MLP,
    Attention,
    DecoderSpec,
    DeltaNet,
    DenseMoE,
    LatentAttention,
    Layer,
    Mamba2,
    MoE,
    ParallelMixers,
    PerLayerInput,
    ShortConv,
)
from tunekit.models.weight_init import InitMixin

MIXERS: dict[type, Callable[..., Any]] = {
    Attention: SelfAttention,
    LatentAttention: MultiLatentAttention,
    DeltaNet: GatedDeltaNet,
    ShortConv: GatedConvolution,
    Mamba2: Mamba2Mixer,
    ParallelMixers: AttentionAndMamba2,
}
FFNS: dict[type, Callable[..., Any]] = {MLP: GatedMLP, MoE: MixtureOfExperts, DenseMoE: DenseMoEFeedForward}


class PerLayerGate(nn.Module):
    """Addend to the residual stream from the vector of a layer, with a gate that reads the stream."""

    def __init__(self, spec: PerLayerInput, model: DecoderSpec) -> None:
        super().__init__()
        self.act = spec.act
        self.per_layer_input_gate = Linear(model.dim, spec.dim, bias=False)
        self.per_layer_projection = Linear(spec.dim, model.dim, bias=False)
        self.norm = RMSNorm(model.dim, model.norm)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        return self.norm(self.per_layer_projection(gated_activation(self.act, self.per_layer_input_gate(x), token)))


class NoMixer(RecurrentMixer):
    """Layer without a token mixer."""

    supports_prefixes = True

    def make_cache(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> LayerKVCache:
        """Cache without slots."""
        return LayerKVCache((batch, 0, 0, 0), (batch, 0, 0, 0), dtype, device)


class Block(InitMixin):
    """A token mixer and a feed-forward layer, or one of the two, each with its norms and a residual connection."""

    layer_scalar: nn.Parameter | None

    def __init__(self, spec: Layer, model: DecoderSpec) -> None:
        super().__init__()
        pre_norm, post_norm = (model.norm if on else None for on in (spec.pre_norm, spec.post_norm))
        self.scale, self.parallel = model.residual_scale, spec.parallel
        self.attn_norm = self.attn_post_norm = self.mlp_norm = self.mlp_post_norm = nn.Identity()
        self.attn = NoMixer() if spec.mixer is None else MIXERS[type(spec.mixer)](model.dim, spec.mixer)
        if spec.mixer is not None or spec.parallel:
            self.attn_norm = make_norm(model.dim, pre_norm)
        if spec.mixer is not None:
            self.attn_post_norm = make_norm(model.dim, post_norm)
        self.mlp = None if spec.ffn is None else FFNS[type(spec.ffn)](model.dim, spec.ffn)
        if spec.ffn is not None:
            reads_input = spec.parallel or isinstance(spec.ffn, DenseMoE)
            self.mlp_norm = make_norm(model.dim, None if reads_input else pre_norm)
            self.mlp_post_norm = make_norm(model.dim, post_norm)
        self.token = None if model.per_layer is None else PerLayerGate(model.per_layer, model)
        scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_parameter("layer_scalar", scalar if spec.scaled else None)

    def forward(
        self, x: Tensor, context: ForwardContext, cache: LayerCache | None = None, token: Tensor | None = None
    ) -> Tensor:
        y = self.attn_norm(x)
        if not isinstance(self.attn, NoMixer):
            x = self.add(x, self.attn_post_norm(self.attn(y, context, cache)))
        if self.mlp is not None:
            x = self.add(x, self.mlp_post_norm(self.mlp(y if self.parallel else self.mlp_norm(x))))
        x = x if self.token is None else x + self.token(x, token)
        return x if self.layer_scalar is None else x * self.layer_scalar.to(x.dtype)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Set the layer scalar to 1."""
        if self.layer_scalar is not None:
            nn.init.ones_(self.layer_scalar)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.scale == 1 else x + y * self.scale
