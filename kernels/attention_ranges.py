"""Attention of queries from ranges of each row on the keys of full rows.

Each context parallel rank has two ranges of queries. The queries of a document in a range become a document of their
own, with the gathered keys of the original document up to the last query. Kernels for packed documents with more keys
than queries then need no mask, which would have an entry per pair of tokens.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.attention import AttentionParams, attention
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout
from tunekit.kernels.torch_compile import disable_compile


@disable_compile  # the number of segments depends on the documents
def attention_sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    ranges: Sequence[range],
    layout: SequenceLayout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries (B, S, H, D) from ranges of each row, on keys and values (B, K, ...) of full rows.

    `layout` bounds the documents in the full rows; without it each row is one document. Queries after the last key are
    padding.
    """
    shape = k.shape[0], k.shape[1]
    layout = rows_layout(*shape) if layout is None else layout
    window = 0 if params.window is None or params.chunk is not None else params.window
    key = "segments", shape, *((queries.start, queries.stop) for queries in ranges), window, q.device
    segments = layout.derive(key, lambda: find_segments(layout, shape, ranges, window, q.device))
    return attention(q, k, v, params, segments.layout, sinks, segments.key_index)


class Segments(NamedTuple):
    """Documents formed from ranges of queries; the last keys of a document belong to its queries."""

    layout: SequenceLayout  # bounds in the flattened queries, and in the gathered keys
    key_index: Tensor  # indices of the gathered keys in the flattened rows, on the device


def find_segments(
    layout: SequenceLayout, shape: tuple[int, int], ranges: Sequence[range], window: int, device: torch.device
) -> Segments:
    """Segments of the queries in `ranges` of each row. `layout` bounds documents in rows of this shape (B, length).

    Queries after the end of a row are padding and attend to arbitrary keys of the row. With a `window` (0: none), keys
    that no query of a segment attends to are omitted.
    """
    rows, length = shape
    documents = list_documents(layout, rows * length)
    sizes, spans = [], []  # queries of each segment; its keys, which are those of a prefix and of the document
    for row in range(rows):
        for queries in ranges:
            first, last = row * length + min(queries.start, length), row * length + min(queries.stop, length)
            for document, prefix in documents:
                start, stop = max(document.start, first), min(document.stop, last)
                if start >= stop:
                    continue
                num_unseen = max(0, len(prefix) + start - document.start - window + 1) if window else 0
                sizes.append(stop - start)
                tokens = range(document.start, stop)
                spans.append((prefix[num_unseen:], tokens[max(0, num_unseen - len(prefix)) :]))
            if padding := len(queries) - (last - first):
                sizes.append(padding)
                spans.append((range(0), range(row * length, row * length + padding)))
    key_index = torch.cat([torch.arange(part.start, part.stop) for parts in spans for part in parts])
    bounds = to_cu_seqlens(sizes), to_cu_seqlens([len(prefix) + len(tokens) for prefix, tokens in spans])
    return Segments(SequenceLayout(bounds[0], key_cu_seqlens=bounds[1]), copy_to_device(key_index, device))


def list_documents(layout: SequenceLayout, num_tokens: int) -> list[tuple[range, range]]:
    """Tokens of each document, and of its prefix. `num_tokens`: of all documents."""
    prefixes = [(0, 0)] * (len(layout.cu_seqlens) - 1)
    if layout.prefixes is not None and not fake_mode.is_fake():
        prefixes = layout.prefixes.tolist()
    return [
        (range(*bounds), range(start, start + count))
        for bounds, (count, start) in zip(pairwise(document_bounds(layout, num_tokens)), prefixes, strict=True)
    ]


def document_bounds(layout: SequenceLayout, num_tokens: int) -> list[int]:
    """Bounds of the documents; in fake mode, of documents of equal lengths."""
    count = len(layout.cu_seqlens) - 1
    return [num_tokens * i // count for i in range(count + 1)] if fake_mode.is_fake() else layout.cu_seqlens.tolist()


def to_cu_seqlens(sizes: Sequence[int]) -> Tensor:
    """Bounds (n + 1,) int32 of documents of these sizes."""
    return torch.tensor([0, *sizes]).cumsum(0).int()
