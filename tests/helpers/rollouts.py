"""Rollouts for tests of rewards."""

from typing import Any

import numpy as np

from tunekit.rollouts.rollout import PromptRow, Rollout


def make_rollout(text: str, tokens: int = 4, where: str = "rows.jsonl:1", **columns: Any) -> Rollout:
    """A rollout of one answer, of `tokens` sampled tokens to a prompt of two tokens."""
    prompt = PromptRow(where, [{"role": "user", "content": "question"}], [1, 2], columns)
    return Rollout(
        prompt,
        0,
        np.arange(2 + tokens, dtype=np.int32),
        np.arange(2 + tokens) >= 2,
        np.zeros(2 + tokens, np.float32),
        "stop",
        [{"role": "assistant", "content": text}],
    )
