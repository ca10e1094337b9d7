"""Pairs of documents that begin alike in every way there is, as batches with what they share written once or twice."""

import numpy as np
import torch
from torch import Tensor

from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.models.decoder import Decoder

VOCAB, CAPACITY = 64, 80
# Tokens of the prompt, of the answers, and with how many tokens these begin alike.
PAIRS = {
    "a prompt": (13, 5, 7, 0),
    "a prompt of one token": (1, 6, 3, 0),
    "a prompt of two tokens": (2, 1, 1, 0),
    "answers that begin alike": (11, 9, 6, 4),
    "an answer that goes on where the other ends": (8, 4, 9, 4),
    "an answer of one token": (21, 1, 12, 0),
    "a long prompt": (38, 5, 6, 1),
}


def answered(prompt: np.ndarray, answer: np.ndarray) -> Document:
    learnt = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Document(np.concatenate([prompt, answer]).astype(np.int32), learnt, len(learnt))


def documents() -> TokenizedDataset:
    """Chosen and rejected in turn. Then a pair without anything in common, and one of a talk that went on."""
    random, found = np.random.default_rng(0), []
    for prompt, chosen, rejected, alike in PAIRS.values():
        asked, first = random.integers(4, VOCAB, prompt), random.integers(4, VOCAB, chosen)
        second = (first[min(alike, chosen - 1)] + 1 + random.integers(0, VOCAB - 5, rejected)) % VOCAB
        second[:alike] = first[:alike]
        found += [answered(asked, first), answered(asked, second)]
    one, other, rest = (random.integers(4, VOCAB, n) for n in (7, 8, 5))
    found += [answered(one, rest), answered(other + (one[0] == other[0]), rest)]
    return TokenizedDataset([*found, answered(one, rest), answered(np.concatenate([one, rest, other]), one)])


def batches(shared: bool, rank: int = 0, size: int = 1, micro_batch: int = 1) -> list[Batch]:
    """Packed rows of whole pairs, the same whether or not pairs share their beginnings."""
    found = documents()
    units = np.arange(len(found)).reshape(-1, 2)
    rows = [part.ravel() for part in np.split(units, [2, 4, 6, 7])]
    layout = Collator(len(rows), micro_batch, rank, size, 0, 4 * CAPACITY, 2, owned=True, shared=shared)
    return layout.batches(found, rows)


def logps(model: Decoder, batch: Batch) -> Tensor:
    """Log-probability of each answer (D,)."""
    assert batch.owner is not None and batch.numbers is not None
    logits = model(batch.tokens, batch.positions, batch.layout)
    each = logits.log_softmax(-1).gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    learnt = batch.targets != IGNORE
    return torch.zeros(len(batch.numbers)).index_add(0, batch.owner[learnt], each[learnt])
