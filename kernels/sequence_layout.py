"""Bounds of packed documents, on the host and copied to a device once, shared by all layers of a pass."""

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

    `cu_seqlens` (documents + 1,) bounds the documents in the flattened (B * S) tokens. `prefixes` (documents, 2)
    contains the number of tokens of an earlier document that precede each document, and the index of the first of these
    in the flattened tokens. Both stay on the CPU, because kernels need sizes on the host.

    This is not a dataclass on purpose. FSDP moves tensors to its device that are arguments of a model or inside of
    tuples, lists and dicts, and it copies dataclasses; it does not inspect other objects.

    Derived tensors are created once, and reused by recomputed layers and the backward pass.
    """

    __slots__ = ("_derived", "cu_seqlens", "key_cu_seqlens", "prefixes", "varlen_bounds")

    def __init__(
        self, cu_seqlens: Tensor, prefixes: Tensor | None = None, key_cu_seqlens: Tensor | None = None
    ) -> None:
        self.cu_seqlens, self.prefixes = cu_seqlens, prefixes
        # Bounds of the keys that documents attend to: by default their prefixes and their own tokens.
        if key_cu_seqlens is None:
            key_cu_seqlens = cu_seqlens if prefixes is None else add_prefix_lengths(cu_seqlens, prefixes)
        self.key_cu_seqlens = key_cu_seqlens
        # Arguments of FlashAttention by chunk size and device. Filled before the layers run, because compiled layers
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
        """CPU tensor from `build`, copied to the device once and without synchronization."""
        return self.derive((name, device), lambda: copy_to_device(build(), device))

    def token_lengths(self, device: torch.device) -> Tensor:
        """Length of the document of each token (B * S,)."""
        lengths = self.cu_seqlens.diff()
        return self.on_device("token_lengths", device, lambda: lengths.repeat_interleave(lengths))

    def key_index(self, device: torch.device) -> Tensor | None:
        """Index (K,) in the flattened tokens of the keys of all documents, prefix first; None without prefixes."""
        prefixes = self.prefixes
        if prefixes is None:
            return None
        return self.on_device("key index", device, lambda: index_keys(self.cu_seqlens, prefixes))


def index_keys(cu_seqlens: Tensor, prefixes: Tensor) -> Tensor:
    """Indices in the flattened tokens of the prefix and then of the tokens of each document."""
    counts, begins = prefixes.long().unbind(1)
    lengths, starts = cu_seqlens.diff().long(), cu_seqlens[:-1].long()
    first, sizes = (torch.stack(pair, 1).flatten() for pair in ((begins, starts), (counts, lengths)))
    return (first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))


def add_prefix_lengths(cu_seqlens: Tensor, prefixes: Tensor) -> Tensor:
    """Bounds of documents that include their prefixes."""
    with torch.inference_mode(False):
        lengths = prefixes[:, 0].long() + cu_seqlens.diff().long()
        return F.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def rows_layout(rows: int, length: int) -> SequenceLayout:
    """Layout in which each row is a document. Cached, with all derived tensors."""
    # Fake tensors must not outlive the plan that created them.
    return build_rows_layout(rows, length) if fake_mode.is_fake() else cached_rows_layout(rows, length)


def build_rows_layout(rows: int, length: int) -> SequenceLayout:
    with torch.inference_mode(False), torch.device("cpu"):
        return SequenceLayout(torch.arange(rows + 1, dtype=torch.int32) * length)


cached_rows_layout = lru_cache(maxsize=16)(build_rows_layout)
