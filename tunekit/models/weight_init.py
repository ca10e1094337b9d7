"""Fresh weights. Each module draws from its own generator, so a layout over devices changes no number."""

import math
import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # the decoder is built of modules that know this file
    from tunekit.models.decoder import Decoder

RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "down_proj")  # what writes into the residual stream


class InitMixin(nn.Module):
    """A module that owns parameters and knows what they are in a model that has learnt nothing."""

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Fill the parameters of this very module; `std` is the spread of a weight here."""
        raise NotImplementedError


def named_generator(seed: int, name: str) -> torch.Generator:
    """The generator of one module or row."""
    return torch.Generator().manual_seed(random.Random(f"{seed} {name}").getrandbits(63))


def normal_init(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that every device gets the same."""
    return torch.randn(shape, generator=generator) * std


def init_weights(model: "Decoder", seed: int) -> None:
    """Normal weights of the spec's spread; what writes into the residual stream is smaller in deeper models."""
    spec = model.spec
    residual = spec.initializer_range / math.sqrt(2 * len(spec.layers))
    for name, module in model.named_modules():
        if isinstance(module, InitMixin) and not (name == "head" and spec.tie_word_embeddings):
            module.init_weights(
                named_generator(seed, name), residual if name.endswith(RESIDUAL_OUTPUTS) else spec.initializer_range
            )
