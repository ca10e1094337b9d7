"""Writes full weights into the parameters of this process."""

import torch
from torch import Tensor

from tunekit.devices import is_pinned_on
from tunekit.models.weight_map import Shape

UPLOAD_CHUNK_BYTES = 64 * 2**20  # bytes per host-to-device copy


class WeightStorage:
    """How parameters store full weights: as they are. `distributed` replaces it for sharded parameters."""

    def full_shape(self, parameter: Tensor) -> Shape:
        """Shape of the full weight."""
        return tuple(parameter.shape)

    @torch.no_grad()
    def copy(self, parameter: Tensor, full: Tensor) -> None:
        """Copy a full weight into a parameter."""
        upload(parameter, full)

    def adopt(self, parameter: Tensor, full: Tensor) -> None:
        """`copy` for a tensor without other users: it becomes the parameter's storage if the layouts match.

        Loading on the CPU is dominated by page faults of new memory, which this avoids.
        """
        same_layout = (full.dtype, full.device, full.stride()) == (
            parameter.dtype,
            parameter.device,
            parameter.stride(),
        )
        # MKL's fp32 matrix-vector product has a different last bit if memory is not aligned to 64 bytes.
        is_aligned = full.itemsize < 4 or full.data_ptr() % 64 == 0
        is_unsharded = type(parameter.data) is Tensor and full.shape == parameter.shape
        if same_layout and is_aligned and is_unsharded and full.untyped_storage().nbytes() == full.nbytes:
            parameter.data = full
        else:
            self.copy(parameter, full)


def upload(target: Tensor, source: Tensor) -> None:
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
