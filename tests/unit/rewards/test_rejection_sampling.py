"""Rows of the best and the worst answers."""

from dataclasses import replace

import pytest

from tests.helpers.rollouts import make_rollout
from tunekit.errors import UserError
from tunekit.rewards.base import ScoredRollout
from tunekit.rewards.rejection_sampling import select_rows
from tunekit.rollouts.rollout import FinishReason


def answers(*items: tuple[int, str, float | None], finish_reason: FinishReason = "stop") -> list[ScoredRollout]:
    """Answers from their group, text and reward."""
    return [
        ScoredRollout(replace(make_rollout(text), group=group, finish_reason=finish_reason), reward, {"r": reward})
        for group, text, reward in items
    ]


ANSWERS = answers(
    (0, "a", 1.0), (0, "b", 3.0), (0, "c", 3.0), (0, "d", None), (1, "e", 0.5), (1, "f", 0.5), (2, "g", None)
)


def test_best_answers() -> None:
    rows = select_rows(ANSWERS, "sft", None, False)
    user = {"role": "user", "content": "question"}
    assert rows == [
        {"messages": [user, {"role": "assistant", "content": "b"}], "reward": 3.0},
        {"messages": [user, {"role": "assistant", "content": "e"}], "reward": 0.5},
    ]
    assert select_rows(ANSWERS, "sft", 1.0, True) == [{"prompt": "question", "completion": "b", "reward": 3.0}]
    assert len(select_rows(ANSWERS, "answers", None, False)) == len(ANSWERS)


def test_pairs_have_different_rewards() -> None:
    [row] = select_rows(ANSWERS, "preference", None, True)
    assert row == {"prompt": "question", "chosen": "b", "rejected": "a", "reward_chosen": 3.0, "reward_rejected": 1.0}
    [row] = select_rows(ANSWERS, "preference", None, False)
    assert row["chosen"] == [{"role": "assistant", "content": "b"}] and row["prompt"][0]["role"] == "user"


def test_answers_that_are_cut_off_are_not_the_best() -> None:
    cut = answers((0, "long", 9.0), (0, "longer", 0.0), finish_reason="length")
    [row] = select_rows([*cut, *answers((0, "b", 3.0))], "preference", None, True)
    assert (row["chosen"], row["rejected"]) == ("b", "longer")
    with pytest.raises(UserError, match="max_new_tokens"):
        select_rows(cut, "sft", None, True)


@pytest.mark.parametrize(
    ("scored", "min_reward", "key"),
    [(ANSWERS[6:], None, "rewards"), (ANSWERS, 4.0, "min_reward"), (ANSWERS[4:6], None, "num_return_sequences")],
)
def test_no_rows_is_an_error(scored: list[ScoredRollout], min_reward: float | None, key: str) -> None:
    with pytest.raises(UserError, match=key):
        select_rows(scored, "preference", min_reward, False)
