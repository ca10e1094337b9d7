"""Losses of models that score: of pairs, of documents with labels or values, of steps in them. Sums, as all losses."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.config.choices import kind_name
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig, DetectedDataset, PreferenceDataset
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.data.row_checks import RewardTarget
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.losses.cross_entropy import local_targets
from tunekit.losses.metric_sums import MetricSums
from tunekit.models.decoder import Decoder, Head
from tunekit.models.spec import ScoreHead


class RewardOutput(NamedTuple):
    """What scores of a batch come to: the loss and figures of its units, added up, and the scores themselves."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    rewards: Tensor | None = None  # (N,), where they are what people want to know the range of


class RewardMetrics:
    """What was scored in a step or in a pass over held-out rows."""

    def __init__(self) -> None:
        self.tally, self.reach = MetricSums(), None

    def add(self, found: RewardOutput) -> None:
        self.tally.add({"loss": found.loss, **found.sums})
        if found.rewards is not None:
            none = found.rewards.new_full((2, 1), -math.inf)  # of no document
            both = torch.stack([found.rewards.detach(), -found.rewards.detach()])
            self.reach = torch.cat([none if self.reach is None else self.reach[:, None], both], dim=1).amax(1)

    def figures(self, run: DistributedContext, count: int) -> dict[str, Tensor]:
        """Means over so many units, of which `loss` is one, and the range of rewards, over all ranks."""
        found = self.tally.means(run, count)
        if self.reach is not None:
            most, least = run.largest(self.reach).unbind()
            found |= {"rewards/max": most, "rewards/min": -least}
        return found


@dataclass(frozen=True)
class RewardLoss:
    """What is made of a head that scores."""

    rows: ClassVar[type[DatasetConfig]] = LabeledDataset  # that it learns from
    problem: ClassVar[str | None] = None  # what transformers calls the task
    counted: ClassVar[bool] = False  # whether labels are classes, from 0 on

    @property
    def told(self) -> RewardTarget:
        """What is learnt of rows."""
        return RewardTarget("labels")

    def score(self, pad: int, names: int = 0) -> ScoreHead:
        """The head that is wanted for rows in which so many classes have names."""
        return ScoreHead(1, pad=pad)

    def check(self, mix: MixtureBase, key: str) -> None:
        """UserError for rows of another kind; what is not recognised yet may be any."""
        for rows in mix.sources:
            if not isinstance(rows, DetectedDataset | self.rows):
                loss, found, wanted = (kind_name(one) for one in (type(self), type(rows), self.rows))
                told = f"{key}: these are {found} rows, and `loss: {loss}` learns from {wanted} rows"
                fit = [kind_name(one) for one in RewardLoss.__subclasses__() if isinstance(rows, one.rows)]
                other = f"take loss={' or '.join(fit)}, or other rows" if fit else "take other rows"
                if key == "eval_data":  # which `data` goes before, and a run may lack
                    other = "leave them out by eval_data=null, or take other rows"
                raise UserError(f"{told} ({rows.source}): {other} by {key}.source and {key}.kind={wanted}")

    def check_labels(self, parts: Iterable[TokenizedDataset], labels: int) -> None:
        """UserError, with its row, for a label that is none of so many classes."""
        for part in parts if self.counted else ():
            wrong = is_invalid_label(found := torch.tensor(part.values), labels).nonzero().flatten()
            if len(wrong) and part.ends is not None:
                row = part.where(int(np.searchsorted(part.ends, int(wrong[0]), side="right")))
                raise UserError(f"{row}: {invalid_label_message(found[wrong], labels)}")

    def units(self, batch: Batch, labels: int) -> int:
        """How many a batch has of what the loss is a mean of. Labels are those of rows that nobody has seen before."""
        found = values(batch)
        if self.counted and len(wrong := found[is_invalid_label(found, labels)]):
            raise UserError(f"data: {invalid_label_message(wrong, labels)}")
        return len(found)

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        """Over all units of a batch."""
        raise NotImplementedError


def is_invalid_label(found: Tensor, labels: int) -> Tensor:
    """Which of them are no classes."""
    return (found < 0) | (found >= labels) | (found % 1 != 0)


def invalid_label_message(found: Tensor, labels: int) -> str:
    return f"the label {float(found[0]):g} is none of {labels} classes, which count from 0: see loss.num_labels"


@dataclass(frozen=True)
class BradleyTerry(RewardLoss):
    """-log σ(r_chosen - r_rejected - margin), as of Llama 2's reward models (arXiv:2307.09288, section 3.2.2)."""

    kind: ClassVar[str] = "bradley_terry"
    rows: ClassVar = PreferenceDataset

    center_rewards_coefficient: float = (
        0.0  # weight of (r_chosen + r_rejected)², which keeps rewards around zero (arXiv:2312.09244)
    )

    def __post_init__(self) -> None:
        if self.center_rewards_coefficient < 0:
            raise FieldError(
                "center_rewards_coefficient", f"must not be below 0, not {self.center_rewards_coefficient}"
            )

    @property
    def told(self) -> RewardTarget:
        return RewardTarget("pairs")

    def units(self, batch: Batch, labels: int) -> int:
        return super().units(batch, labels) // 2

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        rewards = scores(model, batch).squeeze(1)
        chosen, rejected = rewards[::2], rewards[1::2]
        apart = chosen - rejected
        loss = self.center_rewards_coefficient * (chosen + rejected).square() - F.logsigmoid(apart - batch.margins)
        sums = {"chosen": chosen, "rejected": rejected, "accuracies": (apart > 0).float(), "margins": apart}
        sums["mean"] = (chosen + rejected) / 2
        return RewardOutput(loss.sum(), {f"rewards/{name}": value.sum() for name, value in sums.items()}, rewards)


@dataclass(frozen=True)
class Classification(RewardLoss):
    """Cross-entropy of the class of each document, in nats."""

    kind: ClassVar[str] = "classification"
    problem: ClassVar = "single_label_classification"
    counted: ClassVar = True

    num_labels: int | None = None  # how many; null: as many as the rows name, or two

    def __post_init__(self) -> None:
        if self.num_labels is not None and self.num_labels < 2:
            raise FieldError("num_labels", f"must be 2 or more, not {self.num_labels}")

    @property
    def told(self) -> RewardTarget:
        return RewardTarget("labels", self.num_labels)

    def score(self, pad: int, names: int = 0) -> ScoreHead:
        if self.num_labels and names and self.num_labels != names:
            raise FieldError("loss.num_labels", f"{self.num_labels}, but the rows name {names}: leave one of both out")
        return ScoreHead(self.num_labels or names or 2, pad=pad)

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        logits, wanted = scores(model, batch), values(batch).long()
        right = logits.argmax(1) == wanted
        loss = F.cross_entropy(logits, wanted, reduction="sum")
        return RewardOutput(loss, {"accuracy": right.float().sum()})


@dataclass(frozen=True)
class Regression(RewardLoss):
    """Squared error of the value of each document."""

    kind: ClassVar[str] = "regression"
    problem: ClassVar = "regression"

    def score(self, pad: int, names: int = 0) -> ScoreHead:
        if names:
            raise FieldError(
                "data.class_names", "`loss: regression` learns numbers: leave it out, or loss=classification"
            )
        return super().score(pad)

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        found = scores(model, batch).squeeze(1)
        apart = found - values(batch)
        return RewardOutput(apart.square().sum(), {"mae": apart.abs().sum(), "rewards/mean": found.sum()}, found)


@dataclass(frozen=True)
class ProcessReward(RewardLoss):
    """Cross-entropy of whether each step of an answer is right, read at the end of the step (arXiv:2305.20050)."""

    kind: ClassVar[str] = "process_reward"
    rows: ClassVar = StepwiseDataset
    counted: ClassVar = True

    num_labels: int = 2  # wrong and right, or more

    def __post_init__(self) -> None:
        if self.num_labels < 2:
            raise FieldError("num_labels", f"must be 2 or more, not {self.num_labels}")

    @property
    def told(self) -> RewardTarget:
        return RewardTarget("labels", self.num_labels)

    def score(self, pad: int, names: int = 0) -> ScoreHead:
        return ScoreHead(self.num_labels, each=True, bias=True, pad=pad)

    def units(self, batch: Batch, labels: int) -> int:
        found = batch.targets[batch.targets != IGNORE]
        if len(wrong := found[is_invalid_label(found, labels)]):
            raise UserError(f"data: {invalid_label_message(wrong, labels)}")
        return len(found)

    def __call__(self, model: Decoder, batch: Batch) -> RewardOutput:
        targets, at = local_targets(model, batch)
        wanted = targets[at]

        def read(hidden: Tensor, head: Head) -> Tensor:
            return head(hidden.flatten(0, 1)[at].float())

        logits = model(batch.tokens, batch.positions, batch.layout, read=read, part=True)
        right = (logits.argmax(1) == wanted).float().sum()
        loss = F.cross_entropy(logits, wanted, reduction="sum")
        # Other ranks may have other steps of these documents: all of them tell the same.
        return RewardOutput(model.rows.sum(loss), {"accuracy": model.rows.sum(right)})


def scores(model: Decoder, batch: Batch) -> Tensor:
    """What a model gives each document of a batch (D, labels), read at its last token that is no padding, in fp32."""
    count, score = len(values(batch)), model.spec.score
    assert score is not None and batch.owner is not None
    last = last_token_index(batch.owner, batch.tokens, count, score.pad)
    owner = torch.full_like(batch.owner, -1).flatten().scatter(0, last, torch.arange(count, device=last.device))
    owner = model.rows.keep(owner.view_as(batch.owner), -1).flatten()
    here = count if owner.numel() == batch.owner.numel() else int((owner >= 0).sum())
    at = (owner >= 0).nonzero_static(size=here).squeeze(1)

    def read(hidden: Tensor, head: Head) -> Tensor:
        found = head(hidden.flatten(0, 1)[at].float())  # few: their last bits are worth more than their time
        return found.new_zeros(count, score.labels).index_add(0, owner[at], found)

    found = model(batch.tokens, batch.positions, batch.layout, read=read, part=True)
    return model.rows.sum(found)


def last_token_index(owner: Tensor, tokens: Tensor, count: int, pad: int | None) -> Tensor:
    """Where in the flattened rows the last token of each document is that does not pad, or else its first, (D,)."""
    places, mine = torch.arange(owner.numel(), device=owner.device), owner >= 0
    real = mine if pad is None else mine & (tokens != pad)
    whose = (owner.where(some, count).flatten() for some in (mine, real))  # the others go behind the last, and away
    first = places.new_full((count + 1,), owner.numel()).scatter_reduce(0, next(whose), places, "amin")
    return first.scatter_reduce(0, next(whose), places, "amax")[:count]


def values(batch: Batch) -> Tensor:
    """What rows say of each document (D,)."""
    assert batch.values is not None, "rows that are judged"
    return batch.values
