"""Shared prefixes: documents of packed rows that continue from the first tokens of another document."""

from typing import NamedTuple

import torch
from torch import Tensor

from tunekit.kernels.sequence_layout import SequenceLayout


class SharedPrefixKV(NamedTuple):
    """Index of the keys of all documents, prefix first. Gradients of documents with the same prefix are summed."""

    token_index: Tensor  # (K,) indices in the flattened rows of the tokens that documents attend to
    cu_seqlens: Tensor  # (documents + 1,) int32 on the CPU: bounds of the documents in it

    def gather(self, x: Tensor) -> Tensor:
        """Gather keys or values (1, K, H, D) of all documents from those of the rows (B, S, H, D)."""
        return x.flatten(0, 1).index_select(0, self.token_index)[None]


def prefix_keys(layout: SequenceLayout, device: torch.device) -> SharedPrefixKV:
    """Key index of documents with shared prefixes."""

    def key_indices() -> Tensor:
        assert layout.prefixes is not None
        counts, begins = layout.prefixes.long().unbind(1)
        lengths, starts = layout.cu_seqlens.diff().long(), layout.cu_seqlens[:-1].long()
        first, sizes = (torch.stack(pair, 1).flatten() for pair in ((begins, starts), (counts, lengths)))
        return (first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))

    return SharedPrefixKV(layout.on_device("prefix keys", device, key_indices), layout.key_cu_seqlens)


class PrefixIndex(NamedTuple):
    """Prefix of the document of each local token, for rows that context parallel ranks share. Both are (B, S)."""

    counts: Tensor  # number of prefix tokens
    starts: Tensor  # position of the first prefix token in the row


def token_prefix_index(layout: SequenceLayout, like: Tensor) -> PrefixIndex:
    """Prefix index of each token of rows with the shape of `like` (B, S)."""

    def prefix_of_token() -> Tensor:
        assert layout.prefixes is not None
        return layout.prefixes.long().repeat_interleave(layout.cu_seqlens.diff().long(), 0)

    counts, starts = layout.on_device("prefix of each token", like.device, prefix_of_token).unbind(1)
    return PrefixIndex(counts.view(like.shape), (starts % like.shape[1]).view(like.shape))
