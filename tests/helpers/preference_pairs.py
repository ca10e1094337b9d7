"""Preference pairs whose documents share prefixes of all kinds, batched with and without shared prefixes."""

import numpy as np
import torch
from torch import Tensor

from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.models.decoder import Decoder

VOCAB, CAPACITY = 64, 80
# Number of tokens of the prompt, chosen answer and rejected answer, and of tokens that both answers start with.
PAIRS = {
    "a prompt": (13, 5, 7, 0),
    "a prompt of one token": (1, 6, 3, 0),
    "a prompt of two tokens": (2, 1, 1, 0),
    "answers with a common prefix": (11, 9, 6, 4),
    "an answer that extends the other": (8, 4, 9, 4),
    "an answer of one token": (21, 1, 12, 0),
    "a long prompt": (38, 5, 6, 1),
}


def make_document(prompt: np.ndarray, answer: np.ndarray) -> Document:
    loss_mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Document(np.concatenate([prompt, answer]).astype(np.int32), loss_mask, len(loss_mask))


def make_documents() -> TokenizedDataset:
    """Chosen and rejected documents alternate. The last pairs: nothing shared, and a multi-turn conversation."""
    rng, documents = np.random.default_rng(0), []
    for prompt, chosen, rejected, num_shared in PAIRS.values():
        prompt_tokens, chosen_tokens = rng.integers(4, VOCAB, prompt), rng.integers(4, VOCAB, chosen)
        rejected_tokens = (
            chosen_tokens[min(num_shared, chosen - 1)] + 1 + rng.integers(0, VOCAB - 5, rejected)
        ) % VOCAB
        rejected_tokens[:num_shared] = chosen_tokens[:num_shared]
        documents += [make_document(prompt_tokens, chosen_tokens), make_document(prompt_tokens, rejected_tokens)]
    first_prompt, answer, continuation = (rng.integers(4, VOCAB, n) for n in (7, 8, 5))
    documents += [
        make_document(first_prompt, continuation),
        make_document(answer + (first_prompt[0] == answer[0]), continuation),
    ]
    return TokenizedDataset.from_documents(
        [
            *documents,
            make_document(first_prompt, continuation),
            make_document(np.concatenate([first_prompt, continuation, answer]), first_prompt),
        ]
    )


def make_batches(shared: bool, rank: int = 0, size: int = 1, micro_batch: int = 1) -> list[Batch]:
    """Packed rows of complete pairs. The rows do not depend on `shared`."""
    dataset = make_documents()
    units = np.arange(len(dataset)).reshape(-1, 2)
    rows = [group.ravel() for group in np.split(units, [2, 4, 6, 7])]
    collator = Collator(
        len(rows), micro_batch, rank, size, 0, 4 * CAPACITY, 2, with_document_ids=True, share_prefixes=shared
    )
    return collator.micro_batches(dataset, rows)


def answer_logps(model: Decoder, batch: Batch) -> Tensor:
    """Log-probability of each answer, (D,)."""
    logits = model(batch.tokens, batch.positions, batch.layout)
    token_logps = logits.log_softmax(-1).gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    is_target = batch.targets != IGNORE
    return torch.zeros(len(batch.documents.indices)).index_add(
        0, batch.documents.ids[is_target], token_logps[is_target]
    )
