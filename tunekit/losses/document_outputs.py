"""Outputs of a model for whole documents: scores at one of their tokens, or embeddings pooled from all of them."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tunekit.data.check_target import LabelRule
from tunekit.data.dataloader.batch import Batch
from tunekit.data.embedding_datasets import Pooling
from tunekit.data.label_checks import invalid_labels
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder, Head


def document_embeddings(model: Decoder, batch: Batch, pooling: Pooling) -> Tensor:
    """Embeddings (D, dim) in fp32 of the documents of a batch, pooled from hidden states after the final norm."""
    ids, count = batch.documents.ids, len(batch.documents.labels)
    if pooling == "mean":
        sums = sum_over_documents(model, batch, ids, batch.num_tokens, lambda hidden, _: hidden)
        lengths = ids.new_zeros(count + 1).index_add(
            0, ids.where(ids >= 0, count).flatten(), torch.ones_like(ids).view(-1)
        )
        return sums / lengths[:count, None]
    ends = document_ends(ids, ids >= 0, count)[0 if pooling == "cls" else 1]
    return sum_over_documents(model, batch, mark_tokens(ids, ends), count, lambda hidden, _: hidden)


def check_labels(datasets: Iterable[TokenizedDataset], rule: LabelRule | None) -> None:
    """Raise UserError with the row and the reason of the first label that a loss cannot use."""
    if rule is None:
        return
    for dataset in datasets:
        documents, values = invalid_labels(dataset, rule)
        if len(documents):
            raise UserError(f"{dataset.row_location(int(documents[0]))}: {rule.reason(float(values[0]))}")


def document_scores(model: Decoder, batch: Batch) -> Tensor:
    """Scores (D, labels) in fp32 of the documents of a batch, at the last token of each that is not padding."""
    ids, count, score = batch.documents.ids, len(batch.documents.labels), model.spec.score
    assert score is not None
    ids = mark_tokens(ids, last_token_index(ids, batch.tokens, count, score.pad_token_id))
    return sum_over_documents(model, batch, ids, count, lambda hidden, head: head(hidden))


def sum_over_documents(
    model: Decoder, batch: Batch, ids: Tensor, num_tokens: int, read: Callable[[Tensor, Head], Tensor]
) -> Tensor:
    """Sums (D, outputs) of `read(hidden, head)`, in fp32, over selected tokens of each document.

    `ids` (B, S) has the document of each selected token and -1 elsewhere; `num_tokens` are selected.
    """
    local_ids = model.cp_sharding.local_tokens(ids, -1).flatten()
    num_tokens = num_tokens if local_ids.numel() == ids.numel() else int((local_ids >= 0).sum())
    rows = (local_ids >= 0).nonzero_static(size=num_tokens).squeeze(1)

    def sum_tokens(hidden: Tensor, head: Head) -> Tensor:
        outputs = read(hidden.flatten(0, 1)[rows].float(), head)  # fp32 costs little: few tokens, or no matmul
        sums = outputs.new_zeros(len(batch.documents.labels), outputs.shape[1])
        return sums.index_add(0, local_ids[rows], outputs)

    return model.cp_sharding.all_reduce_sum(
        model(batch.tokens, batch.positions, batch.layout, head_fn=sum_tokens, sharded=True)
    )


def mark_tokens(ids: Tensor, positions: Tensor) -> Tensor:
    """Document index (B, S) at one token of each document, -1 elsewhere. `positions` (D,) are in the flattened rows."""
    marked = torch.full_like(ids, -1).flatten()
    return marked.scatter(0, positions, torch.arange(len(positions), device=ids.device)).view_as(ids)


def last_token_index(document_ids: Tensor, tokens: Tensor, count: int, pad: int | None) -> Tensor:
    """Index (D,) in the flattened rows of the last token of each document that is not padding, else of its first."""
    mask = document_ids >= 0
    first, _ = document_ends(document_ids, mask, count)
    _, last = document_ends(document_ids, mask if pad is None else mask & (tokens != pad), count)
    return last.where(last >= 0, first)


def document_ends(document_ids: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices (D,) in the flattened rows of the first and of the last token of each document in `mask` (B, S).

    Of a document without such tokens, they are the number of tokens and -1.
    """
    positions = torch.arange(document_ids.numel(), device=document_ids.device)
    ids = document_ids.where(mask, count).flatten()  # other tokens go to an extra entry, which is dropped
    first = positions.new_full((count + 1,), len(positions)).scatter_reduce(0, ids, positions, "amin")
    last = positions.new_full((count + 1,), -1).scatter_reduce(0, ids, positions, "amax")
    return first[:count], last[:count]
