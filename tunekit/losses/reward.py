"""Losses of reward models and classifiers: pairs, documents with labels or values, and steps of answers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.config.choices import kind_name
from tunekit.data.check_target import LabelRule, RewardTarget
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig, PreferenceDataset
from tunekit.data.detected_dataset import DetectedDataset
from tunekit.data.embedding_datasets import RerankingDataset, RerankingPairsDataset
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError, check_range
from tunekit.losses.cross_entropy import local_targets
from tunekit.losses.document_outputs import check_labels, document_scores
from tunekit.losses.metric_sums import MetricSums, eval_steps
from tunekit.models.decoder import Decoder, Head
from tunekit.models.spec import ScoreHead


class RewardOutput(NamedTuple):
    """Loss and metrics of a batch, summed over its units (pairs, documents or steps)."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    rewards: Tensor | None = None  # rewards (D,), for the metrics rewards/max and rewards/min


class RewardMetrics:
    """Metrics of a step or of an evaluation."""

    def __init__(self) -> None:
        self.sums, self.extremes = MetricSums(), None  # extremes: maximum reward and negated minimum, (2,)

    def add(self, output: RewardOutput) -> None:
        self.sums.add({"loss": output.loss, **output.sums})
        if output.rewards is not None:
            initial = output.rewards.new_full((2, 1), -math.inf)  # result for a batch without documents
            signed = torch.stack([output.rewards.detach(), -output.rewards.detach()])
            previous = initial if self.extremes is None else self.extremes[:, None]
            self.extremes = torch.cat([previous, signed], dim=1).amax(1)

    def means(self, dist: DistributedContext, count: int) -> dict[str, Tensor]:
        """Mean loss and metrics over `count` units, and the largest and smallest reward, over all ranks."""
        means = self.sums.means(dist, count)
        if self.extremes is not None:
            maximum, negated_minimum = dist.all_reduce_max(self.extremes).unbind()
            means |= {"rewards/max": maximum, "rewards/min": -negated_minimum}
        return means


@dataclass(frozen=True)
class RewardLoss:
    """Base class of losses of a model with a score head. Losses are sums over units."""

    dataset_types: ClassVar[tuple[type[DatasetConfig], ...]] = (LabeledDataset, RerankingDataset)  # that it can use
    problem_type: ClassVar[str | None] = None  # `problem_type` in config.json of transformers
    labels_are_classes: ClassVar[bool] = False  # labels are class indices

    @property
    def target(self) -> RewardTarget:
        """Training target of a row."""
        return RewardTarget("labels")

    def score_head(self, pad: int, names: int = 0) -> ScoreHead:
        """Score head for rows that name `names` classes (0: none)."""
        return ScoreHead(1, pad_token_id=pad)

    def check_datasets(self, mix: MixtureBase, key: str) -> None:
        """Raise UserError for a dataset of another kind. Datasets whose kind is not detected yet are accepted."""
        for dataset in mix.dataset_configs:
            if isinstance(dataset, (DetectedDataset, *self.dataset_types)):
                continue
            loss, actual = kind_name(type(self)), kind_name(type(dataset))
            expected = " or ".join(map(kind_name, self.dataset_types))
            problem = f"{key}: loss={loss} needs {expected} rows, but {dataset.source} has {actual} rows"
            matching = [kind_name(k) for k in RewardLoss.__subclasses__() if isinstance(dataset, k.dataset_types)]
            remedy = f"Set loss={' or '.join(matching)}, or set" if matching else "Set"
            if key == "eval_data":  # the loss follows from `data`, and evaluation is optional
                remedy = "Set eval_data=null, or set"
            raise UserError(f"{problem}. {remedy} {key}.source and {key}.kind={expected}.")

    def label_rule(self, labels: int) -> LabelRule:
        """Labels that the loss cannot use with `labels` scores."""
        return LabelRule(
            lambda values: self.is_invalid(values, labels), lambda value: self.invalid_message(value, labels)
        )

    def check_labels(self, datasets: Iterable[TokenizedDataset], labels: int) -> None:
        """Raise UserError with the row of the first label that the loss cannot use with `labels` scores."""
        check_labels(datasets, self.label_rule(labels))

    def is_invalid(self, values: Any, labels: int) -> Any:
        """Mask of the labels, an array or a tensor, that the loss cannot use."""
        return ((values < 0) | (values >= labels) | (values % 1 != 0)) & self.labels_are_classes

    def invalid_message(self, value: float, labels: int) -> str:
        return f"label {value:g} is not a class index from 0 to {labels - 1}. See loss.num_labels"

    def prepare_data(self, model: Decoder, train_data: DataLoader, eval_data: DataLoader | None) -> None:
        """Check that the labels fit the head, and share prompts in packed rows where the model can."""
        for key, data in {"data": train_data, "eval_data": eval_data}.items():
            if data is not None:
                self.check_datasets(data.mixture, key)
                self.check_labels(data.datasets, model.spec.outputs)
                if model.shares_prefixes(data.mixture.max_length):
                    data.share_prefixes()

    @torch.no_grad()
    def evaluate(self, model: Decoder, data: DataLoader | None, dist: DistributedContext) -> dict[str, float]:
        """Loss and metrics of the held-out rows, if there are any."""
        if data is None:
            return {}
        sums, num_units = RewardMetrics(), 0
        for batches in eval_steps(model, data, dist):
            for batch in batches:
                num_units += self.num_units(batch, model.spec.outputs)
                sums.add(self(model, batch.to(dist.device)))
        return {name: float(value) for name, value in sums.means(dist, dist.sum_counts(num_units)).items()}

    def num_units(self, batch: Batch, labels: int) -> int:
        """Number of units of a batch. Raises UserError for invalid labels, which streamed rows may contain."""
        values = self.batch_labels(batch)
        if len(invalid := values[self.is_invalid(values, labels)]):
            raise UserError(f"data: {self.invalid_message(float(invalid[0]), labels)}")
        return len(values)

    def batch_labels(self, batch: Batch) -> Tensor:
        """Labels of a batch: those of its documents."""
        return batch.documents.labels

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        """Loss and metrics, summed over all units of a batch."""
        raise NotImplementedError


def class_names(data: DatasetConfig | MixtureBase) -> tuple[str, ...]:
    """Class names of labeled rows; empty without names."""
    labeled = (rows for rows in MixtureBase.from_config(data).dataset_configs if isinstance(rows, LabeledDataset))
    return next((rows.class_names for rows in labeled), ())


def check_reward_data(
    loss: RewardLoss, data: DatasetConfig | MixtureBase, eval_data: DatasetConfig | MixtureBase | None
) -> None:
    """Raise UserError or FieldError if the datasets do not fit a loss or each other."""
    loss.check_datasets(MixtureBase.from_config(data), "data")
    loss.score_head(0, len(class_names(data)))
    if eval_data is not None:
        loss.check_datasets(MixtureBase.from_config(eval_data), "eval_data")
        if (names := class_names(eval_data)) and names != class_names(data):
            raise FieldError("eval_data.class_names", "must be the same as data.class_names, in the same order")


@dataclass(frozen=True)
class BradleyTerry(RewardLoss):
    """Bradley-Terry loss of pairs, with the margin of Llama 2 (arXiv:2307.09288, section 3.2.2).

    -log σ(r_chosen - r_rejected - margin)
    """

    kind: ClassVar[str] = "bradley_terry"
    dataset_types: ClassVar = (PreferenceDataset, RerankingPairsDataset)

    # Weight of (r_chosen + r_rejected)², which keeps rewards around zero (arXiv:2312.09244)
    center_rewards_coefficient: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "center_rewards_coefficient", ge=0)

    @property
    def target(self) -> RewardTarget:
        return RewardTarget("pairs")

    def num_units(self, batch: Batch, labels: int) -> int:
        return super().num_units(batch, labels) // 2

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        rewards = document_scores(model, batch).squeeze(1)
        chosen, rejected = rewards[::2], rewards[1::2]
        margins = chosen - rejected
        centering = self.center_rewards_coefficient * (chosen + rejected).square()
        loss = centering - F.logsigmoid(margins - batch.documents.margins)
        sums = {"chosen": chosen, "rejected": rejected, "accuracies": (margins > 0).float(), "margins": margins}
        sums["mean"] = (chosen + rejected) / 2
        return RewardOutput(loss.sum(), {f"rewards/{name}": value.sum() for name, value in sums.items()}, rewards)


@dataclass(frozen=True)
class Classification(RewardLoss):
    """Cross-entropy of the class of each document, in nats."""

    kind: ClassVar[str] = "classification"
    problem_type: ClassVar = "single_label_classification"
    labels_are_classes: ClassVar = True

    num_labels: int | None = None  # Number of classes; null: as many as the rows name, or 2

    def __post_init__(self) -> None:
        check_range(self, "num_labels", ge=2)

    @property
    def target(self) -> RewardTarget:
        return RewardTarget("labels", self.num_labels)

    def score_head(self, pad: int, names: int = 0) -> ScoreHead:
        if self.num_labels and names and self.num_labels != names:
            raise FieldError(
                "loss.num_labels", f"{self.num_labels} classes given, but data names {names}. Remove one of the two."
            )
        return ScoreHead(self.num_labels or names or 2, pad_token_id=pad)

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        logits, labels = document_scores(model, batch), batch.documents.labels.long()
        is_correct = logits.argmax(1) == labels
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return RewardOutput(loss, {"accuracy": is_correct.float().sum()})


@dataclass(frozen=True)
class Regression(RewardLoss):
    """Squared error of the value of each document."""

    kind: ClassVar[str] = "regression"
    problem_type: ClassVar = "regression"

    def score_head(self, pad: int, names: int = 0) -> ScoreHead:
        if names:
            raise FieldError(
                "data.class_names", "not supported by loss=regression. Remove it, or set loss=classification."
            )
        return super().score_head(pad)

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        rewards = document_scores(model, batch).squeeze(1)
        error = rewards - batch.documents.labels
        return RewardOutput(error.square().sum(), {"mae": error.abs().sum(), "rewards/mean": rewards.sum()}, rewards)


@dataclass(frozen=True)
class BinaryCrossEntropy(RewardLoss):
    """Binary cross-entropy of each document, whose score is the logit of its label, from 0 to 1: for rerankers."""

    kind: ClassVar[str] = "binary_cross_entropy"
    problem_type: ClassVar = "multi_label_classification"

    pos_weight: float = 1.0  # Weight of labels of 1, such as the number of irrelevant documents per relevant one

    def __post_init__(self) -> None:
        if not 0 < self.pos_weight < math.inf:
            raise FieldError("pos_weight", f"must be > 0, got {self.pos_weight}")

    def score_head(self, pad: int, names: int = 0) -> ScoreHead:
        if names > 2:
            raise FieldError("data.class_names", f"must be at most 2 names, got {names}. Or set loss=classification.")
        return super().score_head(pad)

    def is_invalid(self, values: Any, labels: int) -> Any:
        return (values < 0) | (values > 1)

    def invalid_message(self, value: float, labels: int) -> str:
        return f"label {value:g} is not from 0 to 1. Scale the labels, or set loss=regression."

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        rewards, labels = document_scores(model, batch).squeeze(1), batch.documents.labels
        weight = rewards.new_full((), self.pos_weight)
        loss = F.binary_cross_entropy_with_logits(rewards, labels, pos_weight=weight, reduction="sum")
        is_correct = (rewards > 0) == (labels > 0.5)
        return RewardOutput(loss, {"accuracy": is_correct.float().sum(), "rewards/mean": rewards.sum()}, rewards)


@dataclass(frozen=True)
class ProcessReward(RewardLoss):
    """Cross-entropy of the label of each step of an answer, scored at the last token of the step (arXiv:2305.20050)."""

    kind: ClassVar[str] = "process_reward"
    dataset_types: ClassVar = (StepwiseDataset,)
    labels_are_classes: ClassVar = True

    num_labels: int = 2  # Number of step labels; 2: incorrect and correct

    def __post_init__(self) -> None:
        check_range(self, "num_labels", ge=2)

    @property
    def target(self) -> RewardTarget:
        return RewardTarget("labels", self.num_labels)

    def score_head(self, pad: int, names: int = 0) -> ScoreHead:
        return ScoreHead(self.num_labels, per_token=True, bias=True, pad_token_id=pad)

    def batch_labels(self, batch: Batch) -> Tensor:
        return batch.targets[batch.targets != IGNORE]

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        targets, target_rows = local_targets(model, batch)
        labels = targets[target_rows]

        def read(hidden: Tensor, head: Head) -> Tensor:
            return head(hidden.flatten(0, 1)[target_rows].float())

        logits = model(batch.tokens, batch.positions, batch.layout, head_fn=read, sharded=True)
        num_correct = (logits.argmax(1) == labels).float().sum()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        # CP ranks may hold different steps of these documents. All of them return the same sums.
        return RewardOutput(
            model.cp_sharding.all_reduce_sum(loss), {"accuracy": model.cp_sharding.all_reduce_sum(num_correct)}
        )


RewardFamily = BradleyTerry | Classification | Regression | BinaryCrossEntropy | ProcessReward
