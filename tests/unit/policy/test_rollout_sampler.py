"""Generations in which no answer has a reward."""

from math import nan

import pytest
import torch

from tests.helpers.rollouts import make_rollout
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.policy.rollout_sampler import RewardCheck, ScoredRollouts


def score(*rewards: float) -> ScoredRollouts:
    scores, rollouts = torch.tensor(rewards)[:, None], [make_rollout("yes")] * len(rewards)
    return ScoredRollouts(rollouts, scores, ["vowels"], torch.ones(1), {}, [{}] * len(rewards))


def test_first_generation_without_rewards_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Later ones are logged once: rows without a reward may be in one batch by chance."""
    dist = DistributedContext.single_process()
    dist.step = 0
    check = RewardCheck(dist)
    with pytest.raises(UserError, match=r"rewards: no answer has a reward: vowels .* all 2 answers of step 1"):
        check.check_missing(score(nan, nan))
    check.check_missing(score(nan, 1.0))
    dist.step = 1
    check.check_missing(score(nan, nan))
    check.check_missing(score(nan, nan))
    log = capsys.readouterr().err
    assert log.startswith("doubtful: rewards: no answer") and log.count("\n") == 1
