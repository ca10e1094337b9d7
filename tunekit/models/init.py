"""Fresh weights. Each tensor draws from its own generator, so a layout over devices changes no number."""

import math
import random

import torch
from torch import Tensor, nn

from tunekit.models.decoder import Decoder
from tunekit.models.linear import Embedding, Linear
from tunekit.models.norm import RMSNorm
from tunekit.parallel import put


def seeded(seed: int, name: str) -> torch.Generator:
    """The generator of one tensor."""
    return torch.Generator().manual_seed(random.Random(f"{seed} {name}").getrandbits(63))


def normal(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    return torch.randn(shape, generator=seeded(seed, name)) * std


def randomize(model: Decoder, seed: int) -> None:
    """Normal weights of the spec's spread; what writes into the residual stream is smaller in deeper models."""
    spec = model.spec
    residual = spec.std / math.sqrt(2 * len(spec.layers))
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not (name == "head" and spec.tied):
            std = residual if name.endswith(("o_proj", "down_proj")) else spec.std
            module.fill(normal(torch.Size((module.out_features, module.in_features)), std, seed, name))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Embedding):
            put(module.weight, normal(module.weight.shape, spec.std, seed, name))
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
