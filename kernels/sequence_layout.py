"""Bounds of packed documents: known to the host, copied to a device once, and shared by all layers of a pass."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.device_tensors import copy_to_device

T = TypeVar("T")


class SequenceLayout:
    """Which tokens of a batch belong to one document, and which documents continue from the first tokens of another.

    `cu_seqlens` (documents + 1,) bounds the documents in the flattened (B * S) tokens. `prefixes` (documents, 2) says
    for each document how many tokens of an earlier one precede it, and where these are in the flattened tokens. Both
    are on the CPU and stay there: kernels need sizes on the host.

    This is a plain class on purpose. FSDP moves tensors to its device that it finds among the arguments of a model or
    in tuples, lists and dicts, and copies dataclasses; it does not look into other objects.

    Derived tensors are created once. A recomputed layer and the backward pass find them here again.
    """

    __slots__ = ("_derived", "cu_seqlens", "key_cu_seqlens", "prefixes", "varlen_bounds")

    def __init__(
        self, cu_seqlens: Tensor, prefixes: Tensor | None = None, key_cu_seqlens: Tensor | None = None
    ) -> None:
        self.cu_seqlens, self.prefixes = cu_seqlens, prefixes
        # Bounds of the keys that documents see: by default their own tokens, after their prefixes.
        if key_cu_seqlens is None:
            key_cu_seqlens = cu_seqlens if prefixes is None else add_prefix_lengths(cu_seqlens, prefixes)
        self.key_cu_seqlens = key_cu_seqlens
        # By size of chunk and device: what FlashAttention takes. Filled before the layers run, because a compiled layer
        # may only read it.
        self.varlen_bounds: dict[tuple[int, torch.device], tuple[Tensor, int, Tensor, int]] = {}
        self._derived: dict[Hashable, object] = {}

    def derive(self, key: Hashable, build: Callable[[], T]) -> T:
        """Result of `build`, called once per key. Its tensors are normal ones even in inference mode."""
        if key not in self._derived:
            with torch.inference_mode(False):
                self._derived[key] = build()
        return self._derived[key]  # pyright: ignore[reportReturnType]

    def on_device(self, name: str, device: torch.device, build: Callable[[], Tensor]) -> Tensor:
        """A tensor that `build` makes on the CPU, copied to the device once and without waiting for it."""
        return self.derive((name, device), lambda: copy_to_device(build(), device))

    def token_lengths(self, device: torch.device) -> Tensor:
        """Length of the document of each token (B * S,)."""
        lengths = self.cu_seqlens.diff()
        return self.on_device("token_lengths", device, lambda: lengths.repeat_interleave(lengths))


def add_prefix_lengths(cu_seqlens: Tensor, prefixes: Tensor) -> Tensor:
    """Bounds of documents that include their prefixes."""
    with torch.inference_mode(False):
        lengths = prefixes[:, 0].long() + cu_seqlens.diff().long()
        return F.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def rows_layout(rows: int, length: int) -> SequenceLayout:
    """Each row is a document. Cached, with all that is derived of it."""
    # Tensors without numbers must not outlive the plan that needed them.
    return build_rows_layout(rows, length) if fake_mode.is_fake() else cached_rows_layout(rows, length)


def build_rows_layout(rows: int, length: int) -> SequenceLayout:
    with torch.inference_mode(False), torch.device("cpu"):
        return SequenceLayout(torch.arange(rows + 1, dtype=torch.int32) * length)


cached_rows_layout = lru_cache(maxsize=16)(build_rows_layout)
