"""dtypes of weights and matmuls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tunekit import devices
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import Router

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


@dataclass(frozen=True)
class PrecisionConfig:
    """Frozen weights as stored in the checkpoint, trained weights in fp32 (small updates are lost in bf16)."""

    # dtype of activations and matmuls; `auto`: bf16 where the hardware is fast with it, else fp16 on NVIDIA GPUs, else
    # fp32. fp16 trains with dynamic loss scaling
    compute_dtype: Literal["auto", "bf16", "fp16", "fp32", "tf32"] = "auto"
    master_dtype: Literal["bf16", "fp32"] = "fp32"  # dtype of trained weights, their gradients and the optimizer state
    # dtype of frozen weights; `checkpoint`: as stored, but fp16 instead of bf16 if that is the compute_dtype
    frozen_dtype: Literal["checkpoint", "bf16", "fp16", "fp32"] = "checkpoint"

    def check(self, device: torch.device) -> None:
        """Raise UserError if a device does not support this precision."""
        if self.compute_dtype == "tf32":
            devices.check_tf32(device.type, devices.device_capabilities(device))

    def set_matmul_precision(self, device: torch.device) -> None:
        """Enable TF32 for fp32 matmuls of all models in this process, if configured."""
        self.check(device)
        if self.compute_dtype == "tf32":
            torch.set_float32_matmul_precision("high")

    def apply(self, model: Decoder, checkpoint_dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
        """Set the dtypes of a model on the meta device. `checkpoint_dtypes` are by parameter name."""
        model.compute_dtype = DTYPES[resolve_auto(self.compute_dtype, device)]
        # Routers are small and sensitive, and often stored in a wider dtype than other weights.
        routers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Router))
        for name, parameter in model.named_parameters():
            if not parameter.dtype.is_floating_point:
                continue
            frozen = None if name.startswith(routers) else DTYPES.get(self.frozen_dtype)
            dtype = frozen or checkpoint_dtypes.get(name, torch.float32)
            if frozen is None and dtype == torch.bfloat16 and model.compute_dtype == torch.float16:
                dtype = torch.float16  # a GPU without bf16 would convert it in each matmul
            parameter.data = parameter.data.to(DTYPES[self.master_dtype] if parameter.requires_grad else dtype)


def resolve_auto(compute_dtype: str, device: torch.device) -> str:
    """The compute dtype that `auto` selects on a device; any other is unchanged."""
    if compute_dtype != "auto":
        return compute_dtype
    return choose_compute_dtype(devices.has_fast_bf16(device), devices.device_capabilities(device).fp16)


def choose_compute_dtype(bf16: bool, fp16: bool) -> str:
    """The compute dtype of hardware that is fast with bf16, or with fp16, or with neither."""
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"
