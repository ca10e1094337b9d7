"""Losses of embedding models: over all rows of a step, from the embeddings of all ranks.

The names are those of sentence-transformers. A step embeds its rows in micro-batches, without gradients; the loss then
gives the gradient of each embedding, and a second pass over the micro-batches gives the gradients of the weights
(GradCache, arXiv:2101.06983). The rows of a step compete with each other, on any number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.config.choices import kind_name
from tunekit.data.check_target import LabelRule, RewardTarget
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.data.embedding_datasets import RetrievalDataset, SimilarityDataset
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError, check_range
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.losses.document_outputs import check_labels

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
CHUNK_ROWS = 1024  # rows whose similarities to all documents of a step are in memory at a time


class StepEmbeddings(NamedTuple):
    """Embeddings of a step: (rows, documents per row, dim) fp32 of all ranks, and labels (rows, documents per row).

    `local` selects the documents of this rank from the flattened ones.
    """

    embeddings: Tensor
    labels: Tensor
    local: slice

    @property
    def num_rows(self) -> int:
        return len(self.embeddings)


def gather_embeddings(
    embeddings: list[Tensor], batches: list[Batch], docs_per_row: int, dist: DistributedContext
) -> StepEmbeddings:
    """Embeddings (D, dim) of the micro-batches of this rank, and those of all other ranks."""
    local = torch.cat([F.pad(e.detach(), (0, 1)) for e in embeddings])
    local[:, -1] = copy_to_device(torch.cat([batch.documents.labels for batch in batches]), local.device)
    counts = dist.sum_each_count(*[len(local) * (rank == dist.dp_rank) for rank in range(dist.dims.dp_size)])
    start = sum(counts[: dist.dp_rank])
    local_rows = slice(start, start + len(local))
    rows = local.new_zeros(sum(counts), local.shape[1])
    rows[local_rows] = local
    rows = (dist.all_reduce_sum(rows) / dist.dims.cp).view(-1, docs_per_row, local.shape[1])
    return StepEmbeddings(rows[..., :-1], rows[..., -1], local_rows)


@dataclass(frozen=True)
class EmbeddingLoss:
    """Base class of losses on embeddings."""

    dataset_type: ClassVar[type[RetrievalDataset | SimilarityDataset]] = SimilarityDataset
    target: ClassVar[RewardTarget] = RewardTarget("labels")  # of the rows, for the data checks

    # Matryoshka (arXiv:2205.13147): the loss is a sum over the first N values of the embeddings, for these N, such as
    # [768, 256, 64]; usually with the full dimension. Empty: all values only
    matryoshka_dims: tuple[int, ...] = ()
    matryoshka_weights: tuple[float, ...] = ()  # Weight of each of the matryoshka_dims; empty: 1

    def __post_init__(self) -> None:
        if any(dim < 1 for dim in self.matryoshka_dims):
            raise FieldError("matryoshka_dims", f"must be >= 1, got {min(self.matryoshka_dims)}")
        if self.matryoshka_weights and len(self.matryoshka_weights) != len(self.matryoshka_dims):
            counts = f"{len(self.matryoshka_dims)} values, as matryoshka_dims, got {len(self.matryoshka_weights)}"
            raise FieldError("matryoshka_weights", f"must have {counts}")

    def check_datasets(self, data: DatasetConfig | MixtureBase, eval_data: DatasetConfig | MixtureBase | None) -> None:
        """Raise UserError for rows of another kind."""
        rows = {"data": data} | ({} if eval_data is None else {"eval_data": eval_data})
        datasets = ((key, dataset) for key in rows for dataset in MixtureBase.from_config(rows[key]).dataset_configs)
        for key, dataset in datasets:
            if not isinstance(dataset, self.dataset_type):
                loss, kind, other = (kind_name(cls) for cls in (type(self), self.dataset_type, type(dataset)))
                matching = [kind_name(c) for c in EmbeddingLoss.__subclasses__() if isinstance(dataset, c.dataset_type)]
                problem = f"loss={loss} needs {kind} rows, but {dataset.source} is read as {other} rows"
                raise UserError(f"{key}: {problem}. Set {key}.kind={kind}, or loss={' or '.join(matching)}.")

    def check_dim(self, dim: int) -> None:
        """Raise UserError if embeddings of `dim` values are too short for the Matryoshka dimensions."""
        if max(self.matryoshka_dims, default=0) > dim:
            raise UserError(
                f"loss.matryoshka_dims: must be at most {dim}, the hidden size of the model, "
                f"got {max(self.matryoshka_dims)}"
            )

    def with_gradient(self, step: StepEmbeddings, dist: DistributedContext) -> tuple[Tensor, Tensor]:
        """Loss of a step, and its gradient (D, dim) for the documents of this rank. Ranks share the work."""
        leaf = step.embeddings.detach().requires_grad_()
        total = leaf.new_zeros(())
        for loss in self.chunk_losses(leaf, step.labels, dist):
            loss.backward()
            total += loss.detach()
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        gradient, total = (dist.all_reduce_sum(value) / dist.dims.cp for value in (gradient, total))
        return total, gradient.flatten(0, 1)[step.local]

    @torch.no_grad()
    def without_gradient(self, step: StepEmbeddings, dist: DistributedContext) -> Tensor:
        """Loss of a step."""
        losses = list(self.chunk_losses(step.embeddings, step.labels, dist))
        return dist.all_reduce_sum(sum(losses, step.embeddings.new_zeros(()))) / dist.dims.cp

    def chunk_losses(self, embeddings: Tensor, labels: Tensor, dist: DistributedContext) -> Iterator[Tensor]:
        """Terms of the loss that this data parallel rank computes."""
        dims = self.matryoshka_dims or (embeddings.shape[-1],)
        weights = self.matryoshka_weights or (1.0,) * len(dims)
        for rows in self.chunks(len(embeddings))[dist.dp_rank :: dist.dims.dp_size]:
            for dim, weight in zip(dims, weights, strict=True):
                yield weight * self(F.normalize(embeddings[..., :dim], dim=-1), labels, rows)

    @property
    def label_rule(self) -> LabelRule | None:
        """Scores that the loss cannot use; by default, it can use all."""
        return None

    def check_labels(self, dataset: TokenizedDataset) -> None:
        """Raise UserError for the first score that the loss cannot use."""
        check_labels([dataset], self.label_rule)

    def chunks(self, num_rows: int) -> list[slice]:
        """Rows whose terms are computed together; by default all."""
        return [slice(0, num_rows)]

    def __call__(self, embeddings: Tensor, labels: Tensor, rows: slice) -> Tensor:
        """Part of the loss of a step that belongs to some of its rows. `embeddings` (rows, docs, dim) have norm 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class MultipleNegativesRanking(EmbeddingLoss):
    """InfoNCE (arXiv:1807.03748): cross-entropy of the positive of each query among all documents of the step.

    Negatives are the documents of all other rows, on all ranks, and the hard negatives of all rows. Similarities are
    cosines times `scale`.
    """

    kind: ClassVar[str] = "multiple_negatives_ranking"
    dataset_type: ClassVar = RetrievalDataset
    target: ClassVar = RewardTarget("pairs")

    scale: float = 20.0  # Factor of the cosine similarities; the inverse of the temperature
    # Similarities that compete with the positive: query_to_doc, query_to_query, doc_to_query, doc_to_doc. All four:
    # the loss of GTE (arXiv:2308.03281)
    directions: tuple[Direction, ...] = ("query_to_doc",)
    # One softmax over all directions (`joint`), or the mean over one softmax for each (`per_direction`)
    partition_mode: Literal["joint", "per_direction"] = "joint"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "scale", gt=0)
        if "query_to_doc" not in self.directions or len(set(self.directions)) < len(self.directions):
            raise FieldError("directions", f"must have query_to_doc, and each once, got {', '.join(self.directions)}")
        if self.partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & {*self.directions}:
            raise FieldError("partition_mode", "query_to_query and doc_to_doc need `joint`: they have no positive")

    def chunks(self, num_rows: int) -> list[slice]:
        return [slice(start, start + CHUNK_ROWS) for start in range(0, num_rows, CHUNK_ROWS)]

    def __call__(self, embeddings: Tensor, labels: Tensor, rows: slice) -> Tensor:
        queries, documents = embeddings[:, 0], embeddings[:, 1:].transpose(0, 1)  # (documents per query, rows, dim)
        positives, scores = documents[0][rows], {}
        for direction in self.directions:
            source = queries[rows] if direction.startswith("query") else positives
            targets, count = (documents.flatten(0, 1), len(documents)) if direction.endswith("doc") else (queries, 1)
            scores[direction] = similarities = self.scale * (source @ targets.T)
            if direction in ("query_to_query", "doc_to_doc"):  # similarities to itself, and within the row
                index = torch.arange(len(queries), device=queries.device)
                scores[direction] = similarities.masked_fill(index[rows, None] == index.repeat(count), -torch.inf)
        log_sums = [torch.logsumexp(score, dim=1) for score in scores.values()]
        if self.partition_mode == "joint":
            log_sums = [torch.logsumexp(torch.stack(log_sums), dim=0)]
        positive_scores = self.scale * (queries[rows] * positives).sum(-1)
        return (torch.stack(log_sums).mean(0) - positive_scores).sum() / len(queries)


@dataclass(frozen=True)
class CoSENT(EmbeddingLoss):
    """CoSENT: pairs with a higher score must have a higher cosine similarity than all pairs with a lower one.

    log(1 + Σ exp(scale (cos_i - cos_j))) over all pairs of pairs with score_i < score_j.
    """

    kind: ClassVar[str] = "cosent"

    scale: float = 20.0  # Factor of the cosine similarities

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "scale", gt=0)

    def __call__(self, embeddings: Tensor, labels: Tensor, rows: slice) -> Tensor:
        cosines, scores = self.scale * (embeddings[:, 0] * embeddings[:, 1]).sum(-1), labels[:, 0]
        scores, order = scores.sort()
        cosines = cosines[order]
        higher = torch.searchsorted(scores, scores, right=True)  # start of the pairs with a higher score
        tails = torch.logcumsumexp(-cosines.flip(0), dim=0).flip(0)  # log Σ exp(-cos_j) over j >= i
        tails = F.pad(tails, (0, 1), value=-torch.inf)
        return torch.logsumexp(F.pad(cosines + tails[higher], (1, 0)), dim=0)


@dataclass(frozen=True)
class CosineSimilarity(EmbeddingLoss):
    """Mean squared error of the cosine similarity of each pair. Scores must be from -1 to 1."""

    kind: ClassVar[str] = "cosine_similarity"

    @property
    def label_rule(self) -> LabelRule:
        return LabelRule(lambda labels: abs(labels) > 1, lambda label: f"score {label:g} is not from -1 to 1")

    def __call__(self, embeddings: Tensor, labels: Tensor, rows: slice) -> Tensor:
        cosines = (embeddings[:, 0] * embeddings[:, 1]).sum(-1)
        return F.mse_loss(cosines, labels[:, 0])


EmbeddingFamily = MultipleNegativesRanking | CoSENT | CosineSimilarity
