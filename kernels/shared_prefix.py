"""Documents of packed rows that go on from the first tokens of another: what these are is computed once."""

from typing import NamedTuple

import torch
from torch import Tensor

from tunekit.kernels.sequence_layout import SequenceLayout


class SharedPrefixKV(NamedTuple):
    """Keys of such documents, their prefix before their own. What they give back to a prefix adds up."""

    index: Tensor  # (K,) places in the flattened rows of all that documents see
    cu_seqlens: Tensor  # (documents + 1,) int32 on the CPU: bounds of the documents in it

    def gather(self, x: Tensor) -> Tensor:
        """(1, K, H, D) of all documents from (B, S, H, D) of rows."""
        return x.flatten(0, 1).index_select(0, self.index)[None]


def prefix_keys(layout: SequenceLayout, device: torch.device) -> SharedPrefixKV:
    """Of documents that have a prefix before their own tokens."""

    def places() -> Tensor:
        assert layout.prefixes is not None
        counts, begins = layout.prefixes.long().unbind(1)
        lengths, starts = layout.cu_seqlens.diff().long(), layout.cu_seqlens[:-1].long()
        first, sizes = (torch.stack(pair, 1).flatten() for pair in ((begins, starts), (counts, lengths)))
        return (first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))

    return SharedPrefixKV(layout.on_device("prefix keys", device, places), layout.key_cu_seqlens)


class PrefixIndex(NamedTuple):
    """The same of rows that ranks share: what stands before the document of each token that is here, both (B, S)."""

    counts: Tensor  # of keys
    starts: Tensor  # the first of them, in the row


def token_prefix_index(layout: SequenceLayout, like: Tensor) -> PrefixIndex:
    """Of each token of rows `like` (B, S)."""

    def each() -> Tensor:
        assert layout.prefixes is not None
        return layout.prefixes.long().repeat_interleave(layout.cu_seqlens.diff().long(), 0)

    counts, begins = layout.on_device("prefix of each token", like.device, each).unbind(1)
    return PrefixIndex(counts.view(like.shape), (begins % like.shape[1]).view(like.shape))
