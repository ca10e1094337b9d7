"""Generations in which no answer has a reward."""

from math import nan
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.rollouts import make_rollout
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.policy.rollout_buffer import RolloutBuffer, ScoredRollouts


def score(*rewards: float) -> ScoredRollouts:
    scores, rollouts = torch.tensor(rewards)[:, None], [make_rollout("yes")] * len(rewards)
    return ScoredRollouts(rollouts, scores, ["vowels"], torch.ones(1), {}, [{}] * len(rewards))


def test_first_generation_without_rewards_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Later ones are logged once: rows without a reward may be in one batch by chance."""
    dist = DistributedContext.single_process()
    dist.step = 0
    buffer = RolloutBuffer(SimpleNamespace(dist=dist), None, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"rewards: no answer has a reward: vowels .* all 2 answers of step 1"):
        buffer.check_rewards(score(nan, nan))
    buffer.check_rewards(score(nan, 1.0))
    buffer.generation = 0
    buffer.check_rewards(score(nan, nan))
    buffer.check_rewards(score(nan, nan))
    log = capsys.readouterr().err
    assert log.startswith("doubtful: rewards: no answer") and log.count("\n") == 1
