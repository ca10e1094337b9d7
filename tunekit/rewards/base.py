"""Base of reward functions, and the rewards of rollouts as a tensor."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tunekit.config.choices import kind_name
from tunekit.config.process_guard import ProcessGuard
from tunekit.data.check_target import NO_READERS, ColumnReaders
from tunekit.distributed.context import DistributedContext
from tunekit.environments.config import EnvironmentConfig
from tunekit.errors import CaughtError, FieldError, UserError, find_user_code
from tunekit.rewards.context import RewardContext, mean_metrics
from tunekit.rollouts.rollout import Rollout
from tunekit.rollouts.user_numbers import to_number


@dataclass(frozen=True)
class RewardFunction(ABC):
    """Scores answers. The reward of an answer is the weighted sum of its scores."""

    kind: ClassVar[str]
    column_key: ClassVar[str | None] = None  # config key with the name of a column that rows must have
    weight: float = field(default=1.0, kw_only=True)  # Factor of this reward in the sum of all rewards

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise FieldError("weight", f"must be a finite number, got {self.weight}")

    @property
    def name(self) -> str:
        """Name in metrics."""
        return kind_name(type(self))

    def check(self, columns: Collection[str]) -> None:
        """Raise UserError if rows with these columns cannot be scored. Reads no weights."""
        key = self.column_key
        column: str | None = None if key is None else getattr(self, key)
        if column is not None and column not in columns:
            known = ", ".join(columns) or "none"
            raise UserError(f"{key}: the rows have no column {column!r} (columns: {known}). Set it to one of these.")

    @property
    def column_readers(self) -> ColumnReaders:
        """Columns of rows that this reward reads."""
        column: str | None = None if self.column_key is None else getattr(self, self.column_key)
        return ColumnReaders(frozenset(filter(None, (column,))))

    @property
    def is_async(self) -> bool:
        """Whether the reward waits for something else most of the time, so that others may run meanwhile."""
        return False

    def prepare(self, dist: DistributedContext) -> None:  # noqa: B027
        """Load what this reward needs, such as the weights of a model, on each rank before the first call."""

    @abstractmethod
    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float | None]:
        """Scores of rollouts; None: this reward does not apply to a rollout."""

    def score_in_context(self, rollouts: Sequence[Rollout], context: RewardContext) -> Sequence[float | None]:
        """Scores of rollouts, for rewards that read the progress of the run or log something."""
        return self(rollouts)


@dataclass(frozen=True)
class AnswerReward(RewardFunction):
    """A reward that looks at one answer at a time."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float | None]:
        return [self.score(rollout) for rollout in rollouts]

    @abstractmethod
    def score(self, rollout: Rollout) -> float | None:
        """Score of a rollout."""


def check_rewards(rewards: Sequence[RewardFunction], columns: Collection[str]) -> None:
    """Raise UserError, with the key of the reward, if rows with these columns cannot be scored."""
    for index, reward in enumerate(rewards):
        try:
            reward.check(columns)
        except UserError as error:
            raise UserError(f"rewards.{index}.{error}") from None


def combine_readers(*items: RewardFunction | EnvironmentConfig | None) -> ColumnReaders:
    """Columns of rows that any of some rewards and environments reads."""
    return reduce(or_, (item.column_readers for item in items if item is not None), NO_READERS)


def reward_names(rewards: Sequence[RewardFunction]) -> list[str]:
    """Names of rewards in metrics. The second of the same name ends in `_2`."""
    names: list[str] = []
    for reward in rewards:
        count = sum(name == reward.name or name.startswith(f"{reward.name}_") for name in names) + 1
        names.append(reward.name if count == 1 else f"{reward.name}_{count}")
    return names


@dataclass(frozen=True)
class ScoredRollout:
    """An answer with the weighted sum of its rewards; None if no reward applies."""

    rollout: Rollout
    reward: float | None
    scores: dict[str, float | None]  # by the name of the reward
    columns: dict[str, Any] = field(default_factory=dict)  # logged by reward functions of the user


def gather_answers(
    rewards: Sequence[RewardFunction], rollouts: Sequence[Rollout], context: RewardContext, dist: DistributedContext
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Answers of all ranks with their rewards, in the order of their groups, and logged metrics. Collective."""
    if dist.rank % (dist.dims.cp * dist.dims.tp):
        rollouts = []  # CP and TP ranks have the same ones: those of the first rank count
    ranks = dist.gather_results(lambda: (score_answers(rewards, rollouts, context), context.metrics))
    scored = sorted((item for items, _ in ranks for item in items), key=lambda item: item.rollout.group)  # stable
    return scored, mean_metrics([metrics for _, metrics in ranks])


def score_answers(
    rewards: Sequence[RewardFunction], rollouts: Sequence[Rollout], context: RewardContext
) -> list[ScoredRollout]:
    """Answers with their rewards. The reward of the environment has the weight 1.

    Raises UserError as `score_rollouts` does, and for logged columns that do not have a value for each answer.
    """
    names, weights = [*reward_names(rewards), "environment"], [*(reward.weight for reward in rewards), 1.0]
    scored, all_scores = [], score_rollouts(rewards, rollouts, context).tolist()
    context.check_columns(len(rollouts))
    for rollout, values, columns in zip(rollouts, all_scores, context.rows(len(rollouts)), strict=True):
        values = [*(None if math.isnan(value) else value for value in values), rollout.environment_reward]
        terms = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        scores = dict(zip(names, values, strict=True))
        if rollout.environment_reward is None:
            del scores["environment"]
        rollout = replace(rollout, environment=None)  # it cannot be sent to other ranks
        scored.append(ScoredRollout(rollout, sum(terms) if terms else None, scores, columns))
    return scored


def score_rollouts(
    rewards: Sequence[RewardFunction], rollouts: Sequence[Rollout], context: RewardContext | None = None
) -> Tensor:
    """Scores (R, num_rewards) in fp32 on the CPU, without weights; NaN where a reward does not apply (None).

    Asynchronous rewards run at the same time, each in a thread with an event loop of its own: a notebook has a loop in
    the main thread. Raises UserError, with the reward and the row, for a reward that raises or returns something else
    than numbers, and with the reward if it logs a metric or a column under a name of the run.
    """
    scores, context, names = torch.empty(len(rollouts), len(rewards)), context or RewardContext(), reward_names(rewards)
    if not rollouts:
        return scores
    calls = [
        (reward, rollouts, f"rewards.{index} ({reward.name})", RewardContext(context.trainer_state))
        for index, reward in enumerate(rewards)
    ]
    with ThreadPoolExecutor(1 + len(rewards)) as pool:
        pending = [pool.submit(call_reward, *call) if call[0].is_async else None for call in calls]
        for index, (call, future) in enumerate(zip(calls, pending, strict=True)):
            values = call_reward(*call) if future is None else future.result()
            *_, where, log = call
            log.check_names(where, names)
            context.extend(log)
            for row, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
                scores[row, index] = to_number(value, f"{rollout.prompt.where}: {where}")
    return scores


def call_reward(
    reward: RewardFunction, rollouts: Sequence[Rollout], where: str, context: RewardContext
) -> Sequence[Any]:
    """Scores of rollouts, one each. Raises UserError if there are more or fewer, or if code of the user raises."""
    values: Sequence[Any] | None = None
    with CaughtError() as caught, ProcessGuard(lambda: f"{rollouts[0].prompt.where}: {where}"):
        values = reward.score_in_context(rollouts, context)
    if caught.error is not None:
        location = find_user_code(caught.error)
        if location is None:
            raise caught.error
        row = find_failing_row(reward, rollouts)
        raise UserError(f"{row}: {where}: {location.message}. Fix the function.") from caught.error
    count = len(values) if isinstance(values, list | tuple | np.ndarray | Tensor) else None
    if values is None or count != len(rollouts):
        received = type(values).__name__ if count is None else f"{count} values"
        raise UserError(
            f"{rollouts[0].prompt.where}: {where}: expected a list of {len(rollouts)} numbers, got {received}. "
            "Return one number or None for each completion."
        )
    return values


def find_failing_row(reward: RewardFunction, rollouts: Sequence[Rollout]) -> str:
    """File and row of the first rollout for which a reward raises on its own; the first of all if none does."""
    for rollout in rollouts:
        with CaughtError() as caught:
            reward([rollout])
        if caught.error is not None:
            return rollout.prompt.where
    return rollouts[0].prompt.where
