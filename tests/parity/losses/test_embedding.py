"""Losses and metrics of embeddings equal those of sentence-transformers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from sentence_transformers.sentence_transformer import losses as oracle
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from tunekit.distributed.context import DistributedContext
from tunekit.losses import embedding, embedding_metrics
from tunekit.losses.embedding import CoSENT, CosineSimilarity, EmbeddingLoss, MultipleNegativesRanking, StepEmbeddings

ROWS, DIM = 7, 12
ALL_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


class Passthrough(nn.Module):
    """A model whose features are its embeddings."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["values"]}

    def get_embedding_dimension(self) -> int:
        return DIM


def expected(loss: nn.Module, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of sentence-transformers for (rows, columns, dim)."""
    leaf = embeddings.clone().requires_grad_()
    value = loss([{"values": column} for column in leaf.unbind(1)], labels)
    return value.detach(), *torch.autograd.grad(value, leaf)


def check(ours: EmbeddingLoss, theirs: Callable[[nn.Module], nn.Module], columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    embeddings = torch.randn(ROWS, columns, DIM, generator=generator)
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.3])
    labels = torch.stack([scores] * columns, dim=1)
    step = StepEmbeddings(embeddings, labels, slice(0, ROWS * columns))
    loss, gradient = ours.with_gradient(step, DistributedContext(device="cpu"))
    assert torch.equal(loss, ours.without_gradient(step, DistributedContext(device="cpu")))
    expected_loss, expected_gradient = expected(theirs(Passthrough()), embeddings, scores)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient.flatten(0, 1), rtol=3e-5, atol=3e-6)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("columns", [2, 3, 5])
@pytest.mark.parametrize(("directions", "mode"), [
    (("query_to_doc",), "joint"),
    (ALL_DIRECTIONS, "joint"),
    (("query_to_doc", "doc_to_query"), "per_direction"),
])  # fmt: skip
def test_ranking_loss(columns: int, directions: Any, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in chunks of rows, as on large batches."""
    options = {"scale": 7.0, "directions": directions, "partition_mode": mode}
    for size in (3, 1024):
        monkeypatch.setattr(embedding, "CHUNK_ROWS", size)
        ours = MultipleNegativesRanking(**options)
        check(ours, lambda model: oracle.MultipleNegativesRankingLoss(model, **options), columns)


def test_similarity_losses() -> None:
    check(CoSENT(scale=11.0), lambda model: oracle.CoSENTLoss(model, scale=11.0), 2)
    check(CosineSimilarity(), oracle.CosineSimilarityLoss, 2)


@pytest.mark.parametrize("weights", [(), (0.5, 2.0)])
def test_matryoshka_loss(weights: tuple[float, ...]) -> None:
    dims = DIM, 5
    ours = MultipleNegativesRanking(matryoshka_dims=dims, matryoshka_weights=weights)
    check(
        ours,
        lambda m: oracle.MatryoshkaLoss(m, oracle.MultipleNegativesRankingLoss(m), dims, weights or None),  # type: ignore[arg-type]
        3,
    )
    check(
        CoSENT(matryoshka_dims=dims, matryoshka_weights=weights),
        lambda m: oracle.MatryoshkaLoss(m, oracle.CoSENTLoss(m), dims, weights or None),  # type: ignore[arg-type]
        2,
    )


class Lookup:
    """Model of an evaluator: texts are numbers of embeddings."""

    similarity_fn_name = "cosine"
    model_card_data = None

    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings

    def encode_query(self, texts: list[str], **options: Any) -> Tensor:
        return self.embeddings[[int(text) for text in texts]]

    encode_document = encode_query


@pytest.mark.parametrize("num_documents", [7, 50, 65536])
def test_retrieval_metrics(num_documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated queries have several relevant documents; repeated documents count once."""
    monkeypatch.setattr(embedding_metrics, "CHUNK_DOCUMENTS", num_documents)
    monkeypatch.setattr(embedding_metrics, "CHUNK_QUERIES", 16)
    rng, num_rows, columns = np.random.default_rng(0), 60, 3
    indices = np.arange(num_rows * columns).reshape(num_rows, columns)
    texts = {int(i): bytes(str(i), "ascii") for i in indices.flat}
    texts |= {int(indices[row, 0]): texts[int(indices[row - 1, 0])] for row in range(5, 60, 5)}
    texts |= {int(indices[row, 1]): texts[int(indices[row - 2, 1])] for row in range(7, 60, 7)}
    first = {text: i for i, text in reversed(texts.items())}
    queries = torch.from_numpy(rng.normal(size=(len(texts), DIM))).float()
    embeddings = queries.clone()
    for row in indices:  # positives are near their queries
        embeddings[row[1]] += 0.4 * embeddings[row[0]]
    embeddings = torch.nn.functional.normalize(embeddings[[first[texts[i]] for i in range(len(texts))]], dim=1)
    relevant: dict[str, set[str]] = {}
    for row in indices:
        relevant.setdefault(str(first[texts[row[0]]]), set()).add(str(first[texts[row[1]]]))
    corpus = {str(first[texts[int(i)]]): str(first[texts[int(i)]]) for i in indices[:, 1:].flat}
    options: Any = {"accuracy_at_k": [1], "score_functions": {"cosine": cos_sim}}
    evaluator = InformationRetrievalEvaluator({q: q for q in relevant}, corpus, relevant, **options)
    results = evaluator.compute_metrices(Lookup(embeddings))["cosine"]  # type: ignore[arg-type]
    actual = embedding_metrics.retrieval_metrics(embeddings, indices, texts, torch.device("cpu"))
    assert 0.1 < actual["cosine_accuracy@1"] < 0.9
    assert actual == pytest.approx({
        "cosine_accuracy@1": results["accuracy@k"][1],
        "cosine_mrr@10": results["mrr@k"][10],
        "cosine_ndcg@10": results["ndcg@k"][10],
    })  # fmt: skip


def test_similarity_metrics() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 5, 40) / 4
    values = np.round(scores + rng.normal(size=40), 1)
    actual = embedding_metrics.similarity_metrics(values, scores)
    assert actual["pearson_cosine"] == pytest.approx(scipy.stats.pearsonr(values, scores)[0])
    assert actual["spearman_cosine"] == pytest.approx(scipy.stats.spearmanr(values, scores)[0])
