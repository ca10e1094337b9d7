"""Rewards from another language model, on a server with the OpenAI protocol."""

import json
import math
import re
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from string import Formatter
from typing import Any, ClassVar

from tunekit.config.base_url import check_base_url
from tunekit.data.check_target import ColumnReaders
from tunekit.errors import FieldError, UserError, check_range
from tunekit.rewards.base import RewardFunction
from tunekit.rollouts.completion import expect_list, expect_object
from tunekit.rollouts.openai_client import MAX_RESPONSE_BYTES, OpenAIClient, ResponseError
from tunekit.rollouts.rollout import Rollout
from tunekit.rollouts.user_numbers import MAX_SCORE

PROMPT = """Rate the answer to the question from 0 (useless) to 10 (perfect).

Question:
{prompt}

Answer:
{completion}

End with a line such as: Score: 7"""


@dataclass(frozen=True)
class LLMJudge(RewardFunction):
    """Score that a language model writes, divided by `max_score`. Works with every server of the OpenAI protocol.

    An answer of the judge without a score gives none (the other rewards decide).
    """

    kind: ClassVar[str] = "llm_judge"
    base_url: str  # Address of the server, such as `http://localhost:8000/v1`
    model: str  # Name of the model on the server
    # Text for the judge. {prompt} is the last user message, {completion} the answer, {messages} the whole conversation
    # as JSON; other names in braces are columns. Write literal braces twice: {{ }}
    prompt: str = PROMPT
    score_regex: str = r"(?i)score:\s*\**\s*(-?\d+(?:\.\d+)?)"  # Its last occurrence has the score in its first group
    max_score: float = 10.0  # Scores are divided by this number
    api_key_env: str = "OPENAI_API_KEY"  # Environment variable with the API key, which may be unset
    temperature: float = 0.0  # Sampling temperature of the judge
    max_tokens: int = 1024  # Longest answer of the judge
    timeout_seconds: float = 60.0  # Longest time of a request, from the connection to the last byte of the response
    max_response_bytes: int = MAX_RESPONSE_BYTES  # Size of a response
    max_retries: int = 5  # Repetitions of a request after an error of the server or of the network
    num_workers: int = 16  # Requests at the same time

    def __post_init__(self) -> None:
        super().__post_init__()
        check_base_url(self.base_url)
        check_range(self, "max_score", "timeout_seconds", "max_response_bytes", "num_workers", "max_tokens", gt=0)
        check_range(self, "max_retries", ge=0)
        try:
            if re.compile(self.score_regex).groups < 1:
                raise FieldError("score_regex", f"must have a group, as in 'score: (.*)', got {self.score_regex!r}")
        except re.error as error:
            raise FieldError("score_regex", f"not a regular expression: {error}, got {self.score_regex!r}") from None
        try:
            self.prompt_names()
        except ValueError as error:
            raise FieldError("prompt", f"{error}. Write literal braces twice: {{{{ }}}}") from None

    def prompt_names(self) -> list[str]:
        """Names in braces of the prompt."""
        return [name for _, name, _, _ in Formatter().parse(self.prompt) if name is not None]

    @property
    def column_readers(self) -> ColumnReaders:
        return ColumnReaders(frozenset(self.prompt_names()) - {"prompt", "completion", "messages"})

    def check(self, columns: Collection[str]) -> None:
        """Raise UserError if the prompt names something else than the conversation and its columns."""
        for name in self.prompt_names():
            if name not in ("prompt", "completion", "messages", *columns):
                known = ", ".join(("prompt", "completion", "messages", *columns))
                raise UserError(
                    f"prompt: the rows have no column {name!r} (known: {known}). Write literal braces twice"
                )

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float | None]:
        limits = self.timeout_seconds, self.max_retries, self.max_response_bytes
        client = OpenAIClient("rewards: llm_judge", self.base_url, self.api_key_env, *limits)
        # The client ends first: after an error, no other request keeps the pool open.
        with ThreadPoolExecutor(self.num_workers) as pool, client:
            futures = [pool.submit(self.score, client, rollout) for rollout in rollouts]
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future.done() and future.exception() is not None), None)
            return [future.result() for future in (futures if failed is None else [failed])]

    def score(self, client: OpenAIClient, rollout: Rollout) -> float | None:
        """Score of a rollout; None if the judge writes none, or an impossible number."""
        matches = list(re.finditer(self.score_regex, self.request_answer(client, self.question(rollout))))
        try:
            score = float(matches[-1][1]) / self.max_score if matches else math.nan
        except (TypeError, ValueError):
            return None
        return score if abs(score) <= MAX_SCORE else None

    def question(self, rollout: Rollout) -> str:
        """Prompt of the judge. Texts that are inserted may contain braces."""
        users = [message for message in rollout.prompt.messages if message["role"] == "user"]
        conversation = [*rollout.prompt.messages, *rollout.messages]
        values = {
            **{name: as_text(value) for name, value in rollout.prompt.columns.items()},
            "prompt": as_text(users[-1]["content"] if users else ""),
            "completion": rollout.completion,
            "messages": json.dumps(conversation, ensure_ascii=False),
        }
        parts = Formatter().parse(self.prompt)
        return "".join(text + ("" if name is None else values.get(name, "")) for text, name, _, _ in parts)

    def request_answer(self, client: OpenAIClient, question: str) -> str:
        """Answer of the judge. Raises UserError if the server still fails after all retries."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        response = client.request("chat/completions", body)
        try:
            choices = expect_list(expect_object(response, "the response").get("choices"), "choices")
            choice = expect_object(choices[0] if choices else None, "choices[0]")
            content = expect_object(choice.get("message"), "message").get("content")
        except ResponseError as error:
            raise client.error(f"/chat/completions: {error}") from None
        return content if isinstance(content, str) else ""


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
