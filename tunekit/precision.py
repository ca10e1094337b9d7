"""In which dtype weights are kept and products are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tunekit.models.decoder import Decoder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Precision:
    """Frozen weights as small as the checkpoint has them, trained ones in fp32, which small updates need."""

    compute: Literal["bf16", "fp32"] = "bf16"  # activations and matrix products
    trained: Literal["bf16", "fp32"] = "fp32"  # weights that are trained, their gradients and optimizer state
    frozen: Literal["checkpoint", "bf16", "fp32"] = "checkpoint"  # weights that are not

    def apply(self, model: Decoder, stored: Mapping[str, torch.dtype]) -> None:
        """Set the dtypes of a model that holds no numbers yet; `stored` are those of the checkpoint, by our names."""
        model.compute = DTYPES[self.compute]
        for name, parameter in model.named_parameters():
            if not parameter.dtype.is_floating_point:
                continue
            kept = DTYPES.get(self.frozen) or stored.get(name, torch.float32)
            parameter.data = parameter.data.to(DTYPES[self.trained] if parameter.requires_grad else kept)
