"""Metrics of embeddings of held-out rows, with the names of sentence-transformers: retrieval and rank correlation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.embedding_datasets import Pooling
from tunekit.data.preprocess.tokenized_dataset import ConcatDataset, TokenizedDataset
from tunekit.distributed.context import DistributedContext
from tunekit.losses.document_outputs import document_embeddings
from tunekit.losses.embedding import EmbeddingLoss, gather_embeddings
from tunekit.losses.metric_sums import eval_steps
from tunekit.models.decoder import Decoder

TOP = 10  # documents of a ranking that count
CHUNK_QUERIES, CHUNK_DOCUMENTS = 1024, 65536  # the device holds the similarities of one pair of chunks at a time


@dataclass(frozen=True)
class Embedder:
    """A model with its pooling. In training, a call with the same `index` in a step draws the same dropout."""

    model: Decoder
    pooling: Pooling
    dist: DistributedContext

    def __call__(self, batch: Batch, index: int = 0) -> Tensor:
        """Embeddings (D, dim) in fp32 of micro-batch `index` of a step."""
        self.dist.seed_step(self.dist.step, index)
        return document_embeddings(self.model, batch.to(self.dist.device), self.pooling)


@torch.no_grad()
def evaluate_embeddings(embedder: Embedder, data: DataLoader | None, loss: EmbeddingLoss) -> dict[str, float]:
    """Mean loss of the held-out rows, if there are any, and metrics of `EmbeddingTable`."""
    if data is None:
        return {}
    dist, docs_per_row = embedder.dist, data.mixture.docs_per_row
    table = EmbeddingTable(data.datasets, embedder.model.spec.dim)
    total, num_rows = torch.zeros((), device=dist.device), 0
    for batches in eval_steps(embedder.model, data, dist):
        embeddings = [embedder(batch) for batch in batches]
        step = gather_embeddings(embeddings, batches, docs_per_row, dist)
        total += loss.without_gradient(step, dist) * step.num_rows
        num_rows += step.num_rows
        for batch, output in zip(batches, embeddings, strict=True):
            table.add(batch.documents.indices, output)
    table.reduce(dist)
    return {"loss": float(total / num_rows), **dist.run_on_main(partial(table.metrics, docs_per_row, dist.device))}


class EmbeddingTable:
    """Embeddings (documents, dim) of all documents of a data loader, filled in any order and on all ranks.

    They are in host memory, once on each rank until `reduce`, then on the main process only.
    """

    def __init__(self, datasets: Sequence[TokenizedDataset], dim: int) -> None:
        self.documents = ConcatDataset(datasets)
        self.rows = torch.zeros(len(self.documents), dim + 1)  # the last column counts

    def add(self, indices: Tensor, embeddings: Tensor) -> None:
        """Add the embeddings (D, dim) of documents with these indices (D,)."""
        self.rows.index_add_(0, indices.cpu(), F.pad(embeddings, (0, 1), value=1.0).cpu())

    def reduce(self, dist: DistributedContext) -> None:
        """Add the embeddings of all ranks on the main process. The other ranks free theirs."""
        for rows in self.rows.split(CHUNK_DOCUMENTS):
            rows.copy_(dist.all_reduce_sum(rows.to(dist.device)))
        if not dist.is_main_process:
            self.rows = torch.empty(0)

    def metrics(self, docs_per_row: int, device: torch.device) -> dict[str, float]:
        """Metrics of all rows that were added: Spearman's correlation if they have scores, else those of retrieval.

        Normalizes the embeddings in place.
        """
        counts = self.rows[:, -1].view(-1, docs_per_row)
        seen = (counts > 0).all(1).nonzero().flatten()
        indices = (seen[:, None] * docs_per_row + torch.arange(docs_per_row)).numpy()
        embeddings = self.rows[:, :-1]
        F.normalize(embeddings, dim=1, out=embeddings)
        first = self.documents[int(indices[0, 0])]
        if not math.isnan(first.value):
            scores = np.array([self.documents[int(i)].value for i in indices[:, 0]])
            chunks = np.array_split(indices, math.ceil(len(indices) / CHUNK_DOCUMENTS))
            cosines = [(embeddings[chunk[:, 0]] * embeddings[chunk[:, 1]]).sum(1) for chunk in chunks]
            return similarity_metrics(torch.cat(cosines).numpy(), scores)
        texts = {int(i): self.documents[int(i)].tokens.tobytes() for i in indices.flat}
        return retrieval_metrics(embeddings, indices, texts, device)


def nearest_documents(embeddings: Tensor, queries: Tensor, documents: Tensor, device: torch.device) -> Tensor:
    """Positions of the TOP documents with the largest product with each query, (queries, TOP).

    Queries and documents are rows of the embeddings (rows, dim), which are copied one chunk at a time.
    """
    ranking = [
        (torch.empty(len(chunk), 0), torch.empty(len(chunk), 0).long()) for chunk in queries.split(CHUNK_QUERIES)
    ]
    for number, block in enumerate(documents.split(CHUNK_DOCUMENTS)):
        columns = embeddings[block].to(device).T
        for i, chunk in enumerate(queries.split(CHUNK_QUERIES)):
            similarities, indices = (embeddings[chunk].to(device) @ columns).topk(min(TOP, len(block)), dim=1)
            best = similarities.cpu(), indices.cpu() + number * CHUNK_DOCUMENTS
            values, ids = (torch.cat(pair, dim=1) for pair in zip(ranking[i], best, strict=True))
            values, order = values.topk(min(TOP, values.shape[1]), dim=1)
            ranking[i] = values, ids.gather(1, order)
    return torch.cat([ids for _, ids in ranking])


def retrieval_metrics(
    embeddings: Tensor, indices: np.ndarray, texts: dict[int, bytes], device: torch.device
) -> dict[str, float]:
    """Accuracy, MRR and NDCG of the 10 most similar documents of each query, of the documents of all rows.

    `indices` (rows, docs) are a query, its relevant document, and others. Equal `texts` are one query or document; a
    query of several rows has several relevant documents.
    """
    queries = {texts[int(i)]: int(i) for i in indices[:, 0]}
    documents = {texts[int(i)]: int(i) for i in indices[:, 1:].flat}
    numbers = {text: number for number, text in enumerate(documents)}
    relevant: dict[bytes, set[int]] = {text: set() for text in queries}
    for query, positive, *_ in indices.tolist():
        relevant[texts[query]].add(numbers[texts[positive]])
    query_rows, document_rows = (torch.tensor([*items.values()]) for items in (queries, documents))
    ranking = nearest_documents(embeddings, query_rows, document_rows, device)
    rankings = zip(ranking.tolist(), queries, strict=True)
    is_hit = np.array(
        [[number in relevant[text] for number in numbers_of_text] for numbers_of_text, text in rankings], float
    )
    discounts = 1 / np.log2(np.arange(2, is_hit.shape[1] + 2))
    ideal = np.array([discounts[: len(relevant[text])].sum() for text in queries])
    first = np.where(is_hit.any(1), 1 / (is_hit.argmax(1) + 1), 0.0)
    return {
        "cosine_accuracy@1": float(is_hit[:, 0].mean()),
        f"cosine_mrr@{TOP}": float(first.mean()),
        f"cosine_ndcg@{TOP}": float(((is_hit * discounts).sum(1) / ideal).mean()),
    }


def similarity_metrics(similarities: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Correlations of similarities with scores; NaN if one of them is constant."""
    pearson = correlation(similarities, scores)
    return {"pearson_cosine": pearson, "spearman_cosine": correlation(ranks(similarities), ranks(scores))}


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; NaN if one of both is constant."""
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum() / norm) if norm else math.nan


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of values; equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
