"""Per-layer embeddings of Gemma 4: each layer receives a small vector of the current token."""

from torch import Tensor, nn

from tunekit.kernels.glu import gated_activation
from tunekit.models.linear import Embedding, Linear
from tunekit.models.norm import RMSNorm
from tunekit.models.spec import DecoderSpec, PerLayerInput


class PerLayerEmbedding(nn.Module):
    """Vectors of all layers: a second token embedding plus a projection of the first layer's input."""

    def __init__(self, spec: PerLayerInput, model: DecoderSpec) -> None:
        super().__init__()
        self.shape = len(model.layers), spec.dim
        self.embed = Embedding(spec.vocab, len(model.layers) * spec.dim)
        self.proj = Linear(model.dim, len(model.layers) * spec.dim, bias=False)
        self.norm = RMSNorm(spec.dim, model.norm)

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """One (B, S, dim) per layer, from `tokens` (B, S) and the input of the first layer."""
        of_token = self.embed(tokens).to(x.dtype).unflatten(-1, self.shape) * self.shape[1] ** 0.5
        of_input = self.norm((self.proj(x) * x.shape[-1] ** -0.5).unflatten(-1, self.shape))
        return ((of_input + of_token) * 2**-0.5).unbind(2)


class PerLayerGate(nn.Module):
    """Adds the gated, projected vector of a layer to the residual stream."""

    def __init__(self, spec: PerLayerInput, model: DecoderSpec) -> None:
        super().__init__()
        self.act = spec.act
        self.per_layer_input_gate = Linear(model.dim, spec.dim, bias=False)
        self.per_layer_projection = Linear(spec.dim, model.dim, bias=False)
        self.norm = RMSNorm(model.dim, model.norm)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        return x + self.norm(self.per_layer_projection(gated_activation(self.act, self.per_layer_input_gate(x), token)))
