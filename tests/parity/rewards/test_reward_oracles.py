"""Rewards against TRL and transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from trl.rewards import get_soft_overlong_punishment

from tests.helpers.rollouts import make_rollout
from tunekit.assets import BUNDLED
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.precision import PrecisionConfig
from tunekit.rewards.answer_rewards import SoftOverlongPunishment
from tunekit.rewards.base import check_rewards, score_rollouts
from tunekit.rewards.reward_model import RewardModel


def test_soft_overlong_punishment_is_that_of_trl() -> None:
    lengths = range(1, 30)
    expected = get_soft_overlong_punishment(20, 8)([[0] * length for length in lengths])
    scores = score_rollouts([SoftOverlongPunishment(20, 8)], [make_rollout("", length) for length in lengths])
    torch.testing.assert_close(scores.squeeze(1), torch.tensor(expected))


def save_classifier(path: Path, labels: int) -> transformers.PreTrainedModel:
    """The bundled model with a random score head, saved with its tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        BUNDLED / "model", num_labels=labels, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED / "model")
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model.eval()


def test_reward_model_scores_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rollouts = [make_rollout(text) for text in ("5", "The answer is 5, of course.", "no", "", "yes")]
    reward = RewardModel(str(tmp_path), batch_size=2, precision=PrecisionConfig(compute_dtype="fp32"))
    check_rewards([reward], [])
    with DistributedContext(0, "cpu") as dist:
        reward.prepare(dist)
        loaded = reward.loaded[0].model
        reward.prepare(dist)
        assert reward.loaded[0].model is loaded  # loaded once
        scores = score_rollouts([reward], rollouts)[:, 0]
    expected = []
    for rollout in rollouts:
        messages = [*rollout.prompt.messages, *rollout.messages]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        expected.append(model(ids, attention_mask=torch.ones_like(ids)).logits[0, 0].detach())
    torch.testing.assert_close(scores, torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert scores.std() > 1e-3


def test_models_without_a_single_score_are_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path, 2)
    for name in (str(tmp_path), "tunekit/nano"):
        with pytest.raises(UserError, match=r"rewards\.0\.model"):
            check_rewards([RewardModel(name)], [])
