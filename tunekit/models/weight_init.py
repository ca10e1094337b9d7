"""Writes weights into the parameters of this process, loaded or randomly initialized.

Each module draws from its own generator: results do not depend on the parallel layout.
"""

import math
import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tunekit.devices import is_pinned_on
from tunekit.models.weight_map import Shape

if TYPE_CHECKING:  # decoder modules import this file
    from tunekit.models.decoder import Decoder

UPLOAD_CHUNK_BYTES = 64 * 2**20  # bytes per host-to-device copy
RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "down_proj")


class WeightStorage:
    """How parameters store full weights: as they are. `distributed` replaces it for sharded parameters."""

    def full_shape(self, parameter: Tensor) -> Shape:
        """Shape of the full weight."""
        return tuple(parameter.shape)

    @torch.no_grad()
    def copy(self, parameter: Tensor, full: Tensor) -> None:
        """Copy a full weight into a parameter."""
        upload_tensor(parameter, full)

    def adopt(self, parameter: Tensor, full: Tensor) -> None:
        """`copy` for a tensor without other users: it becomes the parameter's storage if the layouts match.

        Loading on the CPU is dominated by page faults of new memory, which this avoids.
        """
        layouts = [(tensor.dtype, tensor.device, tensor.stride()) for tensor in (full, parameter)]
        # MKL's fp32 matrix-vector product has a different last bit if memory is not aligned to 64 bytes.
        is_aligned = full.itemsize < 4 or full.data_ptr() % 64 == 0
        is_unsharded = type(parameter.data) is Tensor and full.shape == parameter.shape
        if layouts[0] == layouts[1] and is_aligned and is_unsharded and full.untyped_storage().nbytes() == full.nbytes:
            parameter.data = full
        else:
            self.copy(parameter, full)


def upload_tensor(target: Tensor, source: Tensor) -> None:
    """Copy a tensor to a device and cast it there.

    `copy_` casts on the CPU first, and sends twice the bytes from bf16 to fp32. Rows are sent in chunks through pinned
    memory, so that no second copy of the tensor exists.
    """
    if target.device.type == "cpu" or source.device.type != "cpu" or not target.ndim or not target.numel():
        target.copy_(source)
        return
    rows = max(1, UPLOAD_CHUNK_BYTES * len(source) // source.nbytes)
    for target_rows, source_rows in zip(target.split(rows), source.split(rows), strict=True):
        chunk = source_rows.pin_memory() if is_pinned_on(target.device) else source_rows
        target_rows.copy_(chunk.to(target.device, non_blocking=True))


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
