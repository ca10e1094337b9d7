"""Documents of packed rows that go on from the first tokens of another: what these are is computed once."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Prefixes(NamedTuple):
    """Keys of such documents, their prefix before their own. What they give back to a prefix adds up."""

    places: Tensor  # (K,) places in the flattened rows of all that documents see
    offsets: Tensor  # (documents + 1,) int32 on the CPU: bounds of the documents in it

    def take(self, x: Tensor) -> Tensor:
        """(1, K, H, D) of all documents from (B, S, H, D) of rows."""
        return x.flatten(0, 1).index_select(0, self.places)[None]


def keys(offsets: Tensor, prefixes: Tensor, device: torch.device) -> Prefixes:
    """`offsets` (documents + 1,) bound the documents' own tokens; `prefixes` (documents, 2): how many tokens stand
    before these, and where in the flattened rows."""
    counts, begins = prefixes.long().unbind(1)
    lengths = offsets.diff().long()
    first, sizes = (torch.stack(pair, 1).flatten() for pair in ((begins, offsets[:-1].long()), (counts, lengths)))
    index = (first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
    bounds = F.pad((counts + lengths).cumsum(0), (1, 0)).to(offsets.dtype)
    return Prefixes(index.to(device, non_blocking=True), bounds)


class Before(NamedTuple):
    """The same of rows that ranks share: what stands before the document of each token that is here, both (B, S)."""

    counts: Tensor  # of keys
    begins: Tensor  # the first of them, in the row


def of_tokens(offsets: Tensor, prefixes: Tensor, like: Tensor) -> Before:
    """Of each token of rows `like` (B, S)."""
    each = prefixes.long().repeat_interleave(offsets.diff().long(), 0).to(like.device, non_blocking=True)
    counts, begins = each.unbind(1)
    return Before(counts.view(like.shape), (begins % like.shape[1]).view(like.shape))
