"""Rejection sampling: training rows from the best, or the best and the worst, of several answers to each prompt."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

from tunekit.errors import UserError
from tunekit.rewards.base import ScoredRollout
from tunekit.rollouts.rollout import Rollout

OutputFormat = Literal["answers", "sft", "preference"]


def select_rows(
    scored: Sequence[ScoredRollout], output_format: OutputFormat, min_reward: float | None, as_text: bool
) -> list[dict[str, Any]]:
    """Rows of a dataset from the answers to each prompt, which are adjacent and have the same `group`.

    `sft`: the best finished answer, if its reward is at least `min_reward`. `preference`: that, and the worst one, if
    their rewards differ. `answers`: all. With `as_text`, prompts and answers are texts, not messages. Raises UserError
    if no row is left.
    """
    if output_format == "answers":
        return [answer_row(item) for item in scored]
    rows = []
    for _, group in groupby(scored, lambda item: item.rollout.group):
        best_and_worst = find_best_and_worst(list(group))
        if best_and_worst is None or (min_reward is not None and best_and_worst[0].reward < min_reward):
            continue
        best, worst = best_and_worst
        if output_format == "sft":
            rows.append(sft_row(best, as_text))
        elif best.reward > worst.reward and best.rollout.messages != worst.rollout.messages:
            rows.append(preference_row(best, worst, as_text))
    if not rows:
        raise UserError(describe_rejection(scored, output_format, min_reward))
    return rows


def find_best_and_worst(group: Sequence[ScoredRollout]) -> tuple[Any, Any] | None:
    """The first finished answer with the highest reward, and the first answer with the lowest; None without any.

    An answer that a limit cut off is no example: models would learn to end there.
    """
    with_reward = [item for item in group if item.reward is not None]
    finished = [item for item in with_reward if item.rollout.finish_reason == "stop"]
    if not finished:
        return None
    return max(finished, key=lambda item: item.reward or 0.0), min(with_reward, key=lambda item: item.reward or 0.0)


def describe_rejection(scored: Sequence[ScoredRollout], output_format: OutputFormat, min_reward: float | None) -> str:
    """Why there is no row."""
    finished = [item for item in scored if item.rollout.finish_reason == "stop"]
    rewards = [item.reward for item in finished if item.reward is not None]
    if not finished:
        return "sampling.max_new_tokens: all answers were cut off at this limit. Raise it."
    if not rewards:
        return "rewards: no reward applies to any answer. Check the rewards."
    if min_reward is not None and max(rewards) < min_reward:
        return f"min_reward: no answer reaches {min_reward:g}, the best one has {max(rewards):g}. Lower min_reward."
    return (
        f"output_format: {output_format} needs answers with different rewards to the same prompt, and there are none. "
        "Raise num_return_sequences or sampling.temperature."
    )


def answer_row(item: ScoredRollout) -> dict[str, Any]:
    return item.columns | {
        "prompt": list(item.rollout.prompt.messages),
        "answer": item.rollout.completion,
        "finish_reason": item.rollout.finish_reason,
        "reward": item.reward,
        "rewards": item.scores,
        **turns_of(item.rollout),
    }


def turns_of(rollout: Rollout) -> dict[str, Any]:
    """All messages after the prompt, in an environment."""
    return {} if rollout.environment_reward is None else {"messages": list(rollout.messages)}


def sft_row(item: ScoredRollout, as_text: bool) -> dict[str, Any]:
    """Row for `sft`: a conversation, or a prompt with its completion."""
    prompt, answer = prompt_and_answer(item.rollout, as_text)
    row = {"prompt": prompt, "completion": answer} if as_text else {"messages": [*prompt, *answer]}
    return {**row, **tools_of(item.rollout), "reward": item.reward}


def preference_row(best: ScoredRollout, worst: ScoredRollout, as_text: bool) -> dict[str, Any]:
    """Row for `preference`. Environments may write another prompt for each answer, so both have their own."""
    (prompt, chosen), (_, rejected) = (prompt_and_answer(item.rollout, as_text) for item in (best, worst))
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        **tools_of(best.rollout),
        "reward_chosen": best.reward,
        "reward_rejected": worst.reward,
    }


def prompt_and_answer(rollout: Rollout, as_text: bool) -> tuple[Any, Any]:
    """Messages of the prompt and of the answer, or their texts."""
    if as_text:
        return rollout.prompt.messages[-1]["content"], rollout.completion
    return list(rollout.prompt.messages), list(rollout.messages)


def tools_of(rollout: Rollout) -> dict[str, Any]:
    return {"tools": list(rollout.prompt.tools)} if rollout.prompt.tools else {}


def summarize_scores(scored: Sequence[ScoredRollout], num_rows: int, path: str | None) -> Iterator[str]:
    """Lines about the result: rows, prompts, and means of the rewards."""
    num_prompts = len({item.rollout.group for item in scored})
    yield f"{num_rows} rows in {path} from {len(scored)} answers to {num_prompts} prompts"
    for name in scored[0].scores if scored else ():
        values = [item.scores[name] for item in scored]
        numbers = [value for value in values if value is not None]
        mean = f"mean {sum(numbers) / len(numbers):.4g}" if numbers else "no values"
        yield f"  {name}: {mean}" + (f" ({len(values) - len(numbers)} without)" if len(numbers) < len(values) else "")
