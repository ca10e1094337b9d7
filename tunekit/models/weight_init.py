"""Random initialization. Each module draws from its own generator: results do not depend on the parallel layout."""

import math
import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tunekit.models.weight_storage import WeightStorage

if TYPE_CHECKING:  # decoder modules import this file
    from tunekit.models.decoder import Decoder

RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "down_proj")


class InitMixin(nn.Module):
    """Module that can initialize its own parameters for training from scratch."""

    weight_storage = WeightStorage()

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Initialize the direct parameters of this module. `std` is the standard deviation of normal weights."""
        raise NotImplementedError


def named_generator(seed: int, name: str) -> torch.Generator:
    """Random generator of a module or row, seeded by name."""
    return torch.Generator().manual_seed(random.Random(f"{seed} {name}").getrandbits(63))


def normal_init(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    """Normal samples drawn on the CPU, so that all devices get the same values."""
    return torch.randn(shape, generator=generator) * std


def init_weights(model: "Decoder", seed: int) -> None:
    """Initialize all weights. The std of residual outputs is divided by sqrt(2 * layers), as in GPT-2."""
    spec = model.spec
    residual = spec.initializer_range / math.sqrt(2 * len(spec.layers))
    for name, module in model.named_modules():
        if isinstance(module, InitMixin) and not (name == "head" and spec.tie_word_embeddings):
            module.init_weights(
                named_generator(seed, name), residual if name.endswith(RESIDUAL_OUTPUTS) else spec.initializer_range
            )
