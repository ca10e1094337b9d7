"""The documents of a batch again, which know each other by what can be learnt from them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.preprocess.tokenized_dataset import Document


@dataclass(frozen=True)
class DocumentSpan:
    """A document of which something is learnt, up to the last token that is: nobody sees what comes behind.

    Its row in the batch, its tokens and its targets, both (length,).
    """

    row: int
    tokens: np.ndarray
    targets: np.ndarray

    @property
    def num_target_tokens(self) -> int:
        """Tokens that are to be expected."""
        return int((self.targets != IGNORE).sum())

    @property
    def key(self) -> int:
        """64 bits, the same wherever the document lies: beside others, in whatever step and on whatever rank."""
        both = np.stack([self.tokens, self.targets]).astype(np.int64)
        return int.from_bytes(hashlib.blake2b(both.tobytes(), digest_size=8).digest(), "little")

    @property
    def document(self) -> Document:
        """As the loader had it, without what comes behind the last learnt token."""
        tokens = np.append(self.tokens, self.targets[-1]).astype(np.int32)
        return Document(tokens, np.append(False, self.targets != IGNORE), len(tokens))


def unpack_documents(batch: Batch) -> Iterator[DocumentSpan]:
    """The documents of a batch, in their order. Where nothing is learnt, as in padding, is none."""
    count, length = batch.tokens.shape
    tokens, targets = (x.flatten().cpu().numpy() for x in (batch.tokens, batch.targets))
    bounds = range(0, (count + 1) * length, length) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        some = np.flatnonzero(targets[start:end] != IGNORE)
        if len(some):
            end = start + int(some[-1]) + 1
            yield DocumentSpan(start // length, tokens[start:end], targets[start:end])
