"""In which dtype weights are kept and products are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tunekit.models.decoder import Decoder
from tunekit.models.experts import Router

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What Linux calls the instructions of x86 and Arm. Without them products in bf16 are slower than in fp32: 1024 x 1024
# took 21 ms and not 14 where a processor was held to AVX-512, and 2.4 s and not 22 ms where it was held to AVX2.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Precision:
    """Frozen weights as small as the checkpoint has them, trained ones in fp32, which small updates need."""

    compute: Literal["auto", "bf16", "fp32"] = "auto"  # activations and products; auto: bf16 where it is the faster
    trained: Literal["bf16", "fp32"] = "fp32"  # weights that are trained, their gradients and optimizer state
    frozen: Literal["checkpoint", "bf16", "fp32"] = "checkpoint"  # weights that are not

    def apply(self, model: Decoder, stored: Mapping[str, torch.dtype], device: torch.device) -> None:
        """Set the dtypes of a model that holds no numbers yet; `stored` are those of the checkpoint, by our names."""
        best = torch.bfloat16 if multiplies_bf16(device) else torch.float32
        model.compute = DTYPES.get(self.compute, best)
        # They are small, decide much, and are often stored finer than all else.
        routers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Router))
        for name, parameter in model.named_parameters():
            if not parameter.dtype.is_floating_point:
                continue
            frozen = None if name.startswith(routers) else DTYPES.get(self.frozen)
            kept = frozen or stored.get(name, torch.float32)
            parameter.data = parameter.data.to(DTYPES[self.trained] if parameter.requires_grad else kept)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bf16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return CPU_INFO.is_file() and not BF16_FLAGS.isdisjoint(CPU_INFO.read_text().split())
