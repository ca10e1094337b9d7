"""Attention of queries from ranges of each row on the keys of full rows, by kernels for packed documents.

Each context parallel rank has two ranges of queries. The queries of a document in a range become a document of their
own, with the gathered keys of the original document up to the last query. Kernels for packed documents with more keys
than queries then need no mask, which would have an entry per pair of tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tunekit.kernels.device_tensors import copy_to_device
from tunekit.kernels.sequence_layout import SequenceLayout


class Segments(NamedTuple):
    """Documents formed from ranges of queries; the last keys of a document belong to its queries."""

    layout: SequenceLayout  # bounds in the flattened queries, and in the gathered keys
    keys: Tensor  # indices of the gathered keys in the flattened rows, on the device


def find_segments(
    cu_seqlens: Tensor, shape: tuple[int, int], ranges: Sequence[range], window: int, device: torch.device
) -> Segments:
    """Segments of the queries in `ranges` of each row. `cu_seqlens` bounds documents in rows of this shape (B, length).

    Queries after the end of a row are padding and attend to arbitrary keys of the row. With a `window` (0: none), keys
    that no query of a segment attends to are omitted.
    """
    rows, length = shape
    bounds = cu_seqlens.tolist()
    sizes, spans = [], []  # queries of each segment, and its keys (first, last + 1)
    for row in range(rows):
        for queries in ranges:
            first, last = row * length + min(queries.start, length), row * length + min(queries.stop, length)
            for begin, end in documents_in_range(bounds, first, last):
                start = max(begin, first)
                stop = min(end, last)
                seen = max(begin, start - window + 1) if window else begin
                sizes.append(stop - start)
                spans.append((seen, stop))
            if padding := len(queries) - (last - first):
                sizes.append(padding)
                spans.append((row * length, row * length + padding))
    keys = torch.cat([torch.arange(*span) for span in spans])
    counts = [stop - start for start, stop in spans]
    layout = SequenceLayout(to_cu_seqlens(sizes), key_cu_seqlens=to_cu_seqlens(counts))
    return Segments(layout, copy_to_device(keys, device))


def documents_in_range(bounds: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
    """Bounds of the documents that have tokens in [first, last)."""
    documents = zip(bounds[:-1], bounds[1:], strict=True)
    return [(begin, end) for begin, end in documents if begin < end and begin < last and end > first]


def to_cu_seqlens(sizes: Sequence[int]) -> Tensor:
    """Bounds (n + 1,) int32 of documents of these sizes."""
    return torch.tensor([0, *sizes]).cumsum(0).int()


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    fused: Callable[[Tensor, Tensor, Tensor, SequenceLayout], Tensor],
) -> Tensor:
    """Causal attention (B, S, H, D_v) by a kernel for packed documents: fused(q, k, v, layout)."""
    k, v = (x.flatten(0, 1).index_select(0, segments.keys)[None] for x in (k, v))
    return fused(q, k, v, segments.layout)
