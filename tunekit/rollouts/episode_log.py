"""Episodes as lines of JSON: messages, rewards, and each token with its log-probability and advantage."""

from collections.abc import Mapping, Sequence
from typing import Any

from tunekit.data.inspect.token_display import decode_groups
from tunekit.data.tokenizer import Tokenizer
from tunekit.rollouts.rollout import Rollout

DIGITS = 6  # of log-probabilities and advantages


def episode_record(
    tokenizer: Tokenizer,
    rollout: Rollout,
    rewards: Mapping[str, float | None],
    reward: float | None,
    advantages: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A line of `episodes.jsonl`. `rewards` are the scores by name, `reward` their sum.

    `advantages` (completion tokens,) are those of the tokens after the prompt; None: not trained. Lists of the record
    have one item for each of these tokens; a character of several tokens is the text of the first.
    """
    ids, start = rollout.completion_ids, rollout.prompt_length
    texts = [text for group, text, _ in decode_groups(tokenizer, ids) for text in (text, *[""] * (len(group) - 1))]
    return {
        "row": rollout.prompt.where,
        "prompt": list(rollout.prompt.messages),
        "messages": list(rollout.messages),
        **({"tools": list(rollout.prompt.tools)} if rollout.prompt.tools else {}),
        "reward": reward,
        "rewards": dict(rewards),
        "finish_reason": rollout.finish_reason,
        "metrics": dict(rollout.metrics),
        "prompt_text": tokenizer.decode(list(rollout.prompt.tokens), special=True),
        "num_prompt_tokens": start,
        "token_ids": ids,
        "tokens": texts,
        "sampled": rollout.loss_mask[start:].tolist(),
        "logprobs": [round(value, DIGITS) for value in rollout.logprobs[start:].tolist()],
        "advantages": None if advantages is None else [round(float(value), DIGITS) for value in advantages],
    }
