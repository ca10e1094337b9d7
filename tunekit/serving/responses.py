"""JSON of responses: whole ones, and the chunks of a stream."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tunekit.data.tokenizer import Tokenizer
from tunekit.serving.choices import (
    AnswerToken,
    Choice,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    format_calls,
    new_id,
)
from tunekit.serving.request_fields import AnswerOptions, Endpoint

DONE = b"data: [DONE]\n\n"


def format_event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class ResponseFormat:
    """Writes the responses to one request."""

    endpoint: Endpoint
    tokenizer: Tokenizer
    options: AnswerOptions
    num_prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = new_id("chatcmpl" if self.endpoint == "chat" else "cmpl")
        prefix = "" if self.endpoint == "chat" else "bytes:"  # as in OpenAI's protocol
        self.names = TokenNames(self.tokenizer, self.options.names_tokens_by_id, prefix)

    def header(self, is_chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self.endpoint == "chat":
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.options.model}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        num_tokens = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }

    def logprobs(self, tokens: Sequence[AnswerToken], choice: Choice) -> dict[str, Any] | None:
        if self.options.num_logprobs is None:
            return None
        if self.endpoint == "chat":
            return chat_logprobs(self.names, tokens)
        return completion_logprobs(self.names, tokens, len(choice.text) if choice.finish_reason else sys.maxsize)

    def complete(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The response to a request without streaming."""
        items = [self.choice(index, choice) for index, choice in enumerate(choices)]
        is_chat = self.endpoint == "chat" and self.options.returns_token_ids
        prompt = {"prompt_token_ids": [*choices[0].prompt_tokens]} if is_chat else {}
        return {**self.header(), "choices": items, "usage": self.usage(choices), **prompt}

    def token_ids(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """The field with token ids, if the request asks for it."""
        return {"token_ids": [item.token for item, _ in tokens]} if self.options.returns_token_ids else {}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        parsed, logprobs = choice.result(), self.logprobs(choice.tokens, choice)
        fields = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        fields |= self.token_ids(choice.tokens)
        if self.endpoint == "completion":
            prompt = {"prompt_token_ids": [*choice.prompt_tokens]} if self.options.returns_token_ids else {}
            return {**fields, **prompt, "text": parsed.content}
        calls = {"tool_calls": format_calls(parsed.tool_calls)} if parsed.tool_calls else {}
        content = parsed.content if parsed.content or not calls else None
        reasoning = {"reasoning_content": parsed.reasoning_content} if parsed.reasoning_content else {}
        message = {"role": "assistant", "content": content, "refusal": None, **reasoning, **calls}
        return {**fields, "message": message}

    def first_chunks(self, num_choices: int) -> list[bytes]:
        """Chunks with the role, before the first tokens."""
        if self.endpoint == "completion":
            return []
        delta = {"role": "assistant", "content": ""}
        return [self.chunk({"index": index, "delta": delta, "finish_reason": None}) for index in range(num_choices)]

    def delta_chunk(self, index: int, choice: Choice, tokens: Sequence[AnswerToken]) -> bytes | None:
        """Chunk with new text of a choice; None if there is nothing to send yet."""
        delta = choice.delta()
        wants_logprobs = self.options.num_logprobs is not None and bool(tokens)
        token_ids = self.token_ids(tokens) if tokens else {}
        if not (delta.content or delta.reasoning_content or choice.finish_reason or wants_logprobs or token_ids):
            return None
        fields = {
            "index": index,
            "logprobs": self.logprobs(tokens, choice) if wants_logprobs else None,
            "finish_reason": choice.finish_reason,
            **token_ids,
        }
        if self.endpoint == "completion":
            return self.chunk({**fields, "text": delta.content})
        message: dict[str, Any] = {"content": delta.content} if delta.content else {}
        if delta.reasoning_content:
            message["reasoning_content"] = delta.reasoning_content
        if delta.tool_calls:
            calls = format_calls(delta.tool_calls)
            message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        return self.chunk({**fields, "delta": message})

    def chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self.options.includes_usage else {}
        return format_event({**self.header(is_chunk=True), "choices": [choice], **usage})

    def last_chunks(self, choices: Sequence[Choice]) -> list[bytes]:
        """Chunks after all choices are finished."""
        usage = {**self.header(is_chunk=True), "choices": [], "usage": self.usage(choices)}
        return [*([format_event(usage)] if self.options.includes_usage else []), DONE]
