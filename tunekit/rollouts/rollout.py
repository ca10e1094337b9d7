"""A sampled conversation as tokens: what the model sampled is what it is trained on, without tokenizing text again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tunekit.data.chat_template.messages import Message
from tunekit.environments.base import Environment

# `stop`: the model or its environment ended the conversation; `length`: a limit on tokens or turns cut it off
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class PromptRow:
    """A dataset row to answer. `columns` are all fields of the row, for rewards and environments."""

    where: str  # file and row, for error messages
    messages: Sequence[Message]  # up to the answer
    tokens: Sequence[int]  # the messages as the chat template renders them, up to the start of the answer
    columns: Mapping[str, Any]
    tools: Sequence[dict[str, Any]] | None = None  # JSON schemas of the tools in the prompt
    is_text: bool = False  # a text that the model continues, without a chat template


@dataclass(frozen=True)
class Rollout:
    """One sampled conversation of N tokens: the prompt, then sampled tokens and observations of the environment."""

    prompt: PromptRow
    group: int  # index of the prompt in the step; rollouts of a group answer the same prompt
    tokens: np.ndarray  # (N,) int32
    loss_mask: np.ndarray  # (N,) bool: sampled tokens; prompts and observations are not learned
    logprobs: np.ndarray  # (N,) fp32: log-probabilities at sampling, temperature included; 0 for other tokens
    finish_reason: FinishReason
    messages: Sequence[Message]  # after the prompt: answers, tool results, observations
    environment_reward: float | None = None  # sum over the turns; None without an environment
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the environment, such as the number of tool calls
    environment: Environment | None = None  # after the episode, on the rank that ran it, until the answer is scored

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return len(self.prompt.tokens)

    @property
    def completion_ids(self) -> list[int]:
        """All tokens after the prompt, observations included."""
        return self.tokens[self.prompt_length :].tolist()

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def is_cut_off_at(self, length: int) -> bool:
        """Whether the last answer was cut off because the tokens reached a length."""
        return self.finish_reason == "length" and len(self.tokens) >= length

    @property
    def completion(self) -> str:
        """Text of the last answer; empty without one."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        return str(answers[-1].get("content") or "") if answers else ""
