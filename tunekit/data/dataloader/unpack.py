"""Split batches back into documents, which are identified by a hash of their tokens and targets."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.document import Document


@dataclass(frozen=True)
class DocumentSpan:
    """A document with target tokens, up to the last one: later tokens do not affect its targets.

    Its row in the batch, its tokens and its targets, both (length,).
    """

    row: int
    tokens: np.ndarray
    targets: np.ndarray

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens."""
        return int((self.targets != IGNORE).sum())

    @property
    def key(self) -> int:
        """64-bit hash, independent of the step, the rank, and the packed row that contain the document."""
        values = np.stack([self.tokens, self.targets]).astype(np.int64)
        return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=8).digest(), "little")

    @property
    def document(self) -> Document:
        """Document of the data loader, without the tokens after the last target token."""
        tokens = np.append(self.tokens, self.targets[-1]).astype(np.int32)
        return Document(tokens, np.append(False, self.targets != IGNORE), len(tokens))


def unpack_documents(batch: Batch) -> Iterator[DocumentSpan]:
    """Documents of a batch, in order. Documents without target tokens, such as padding, are left out."""
    num_rows, width = batch.tokens.shape
    tokens, targets = (x.flatten().cpu().numpy() for x in (batch.tokens, batch.targets))
    bounds = range(0, (num_rows + 1) * width, width) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        target_indices = np.flatnonzero(targets[start:end] != IGNORE)
        if len(target_indices):
            end = start + int(target_indices[-1]) + 1
            yield DocumentSpan(start // width, tokens[start:end], targets[start:end])
