"""Alternating updates (AltUp) of Gemma 3n: a layer reads one of several residual streams and updates all of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.models.block import Block
from tunekit.models.forward_context import ForwardContext, LayerCache
from tunekit.models.linear import Linear
from tunekit.models.norm import RMSNorm
from tunekit.models.spec import AltUp, DecoderSpec, Layer, Norm
from tunekit.models.weight_init import InitMixin, normal_init

MIN_MEAN_SQUARE = 1e-5


class SplitStreams(nn.Module):
    """Residual streams from the embedding."""

    def __init__(self, dim: int, spec: AltUp) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(dim, dim, bias=False) for _ in range(spec.streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Streams (B, S, N, dim) from (B, S, dim), which is the first one."""
        return torch.stack([x, *(match_magnitude(project(x), x) for project in self.projections)], dim=2)


class JoinStreams(nn.Module):
    """Input of the last norm from the residual streams."""

    def __init__(self, dim: int, spec: AltUp) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(dim, dim, bias=False) for _ in range(spec.streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Mean (B, S, dim) of the projected streams (B, S, N, dim). The first one is not projected."""
        first, *others = x.unbind(2)
        pairs = zip(self.projections, others, strict=True)
        return torch.stack([first, *(match_magnitude(project(y), first) for project, y in pairs)]).mean(0)


def match_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Scale the vectors of `x` (..., dim) to the root mean square of those of `like`."""
    target, actual = (y.square().mean(-1, keepdim=True) for y in (like, x))
    # The embedding of padding may be 0, where the root has no derivative.
    target = target.clamp(min=torch.finfo(target.dtype).tiny)
    return x * target.sqrt() / actual.clamp(min=MIN_MEAN_SQUARE).sqrt()


class StreamCoefficients(InitMixin):
    """Coefficients of predictions and corrections. Like a router, never quantized and never adapted."""

    def __init__(self, dim: int, spec: AltUp, norm: Norm) -> None:
        super().__init__()
        self.spec, count = spec, spec.streams
        self.router_norm = RMSNorm(dim, norm)
        self.modality_router = nn.Parameter(torch.zeros(count, dim))
        self.prediction_coefs = nn.Parameter(torch.zeros(count**2, count))
        self.correction_coefs = nn.Parameter(torch.zeros(count, count))
        self.correct_output_scale = nn.Parameter(torch.zeros(dim), requires_grad=spec.scales_output)

    def predict(self, streams: Tensor) -> Tensor:
        """Streams (B, S, N, dim) after the layer, predicted from those before it."""
        coefs = self.map_modalities(streams[:, :, 0], self.prediction_coefs)
        return streams + coefs.unflatten(-1, (self.spec.streams, -1)) @ streams

    def correct(self, predictions: Tensor, output: Tensor) -> Tensor:
        """Predictions, corrected by the difference of the layer's output (B, S, dim) from the first one."""
        coefs = self.map_modalities(output, self.correction_coefs) + 1
        return predictions + coefs[..., None] * (output - predictions[:, :, 0])[:, :, None]

    def map_modalities(self, x: Tensor, coefs: Tensor) -> Tensor:
        """Linear map of the router's N outputs for (B, S, dim)."""
        routed = F.linear(self.router_norm(x) / x.shape[-1], self.modality_router.to(x.dtype))
        limit = self.spec.coef_clip if self.training else None
        coefs = coefs if limit is None else coefs.clamp(-limit, limit)
        return F.linear(routed.float().tanh().type_as(x), coefs.to(x.dtype))

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Draw normal weights; the scale of the first stream is 0."""
        for weight in (self.modality_router, self.prediction_coefs, self.correction_coefs):
            self.weight_storage.copy(weight, normal_init(weight.shape, std, generator))
        nn.init.zeros_(self.correct_output_scale)


class LowRankResidual(nn.Module):
    """Learned augmented residual layer (LAuReL): x plus the norm of a low-rank map of x."""

    def __init__(self, dim: int, spec: AltUp, norm: Norm) -> None:
        super().__init__()
        self.linear_left = Linear(dim, spec.laurel_rank, bias=False)
        self.linear_right = Linear(spec.laurel_rank, dim, bias=False)
        self.norm = RMSNorm(dim, norm)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear_right(self.linear_left(x)))


class AltUpBlock(Block):
    """Block that computes the first of the residual streams (B, S, N, dim)."""

    def __init__(self, spec: Layer, model: DecoderSpec) -> None:
        super().__init__(spec, model)
        assert model.altup is not None
        self.coefficients = StreamCoefficients(model.dim, model.altup, model.norm)
        self.laurel = LowRankResidual(model.dim, model.altup, model.norm)
        self.scales_output = model.altup.scales_output

    def forward(
        self, x: Tensor, context: ForwardContext, cache: LayerCache | None = None, token: Tensor | None = None
    ) -> Tensor:
        assert self.token is not None and self.mlp is not None
        predictions = self.coefficients.predict(x)
        first = predictions[:, :, 0]
        y = self.attn_norm(first)
        attended = first + self.attn_post_norm(self.attn(y, context, cache))
        mixed = (attended + self.laurel(y)) * 2**-0.5
        output = mixed + self.mlp_post_norm(self.mlp(self.mlp_norm(mixed)))
        streams = self.coefficients.correct(predictions, output)
        first, others = streams[:, :, :1], streams[:, :, 1:]
        gate = first[:, :, 0]
        gate = gate * self.coefficients.correct_output_scale.to(gate.dtype) if self.scales_output else gate
        return torch.cat([first, others + self.token(gate, token)[:, :, None]], dim=2)
