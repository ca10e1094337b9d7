"""Answers of the model as the choices of a response: texts, tool calls, log-probabilities."""

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tunekit.data.chat_template.call_formats import CallError, Scanner, json_call
from tunekit.data.chat_template.tool_calls import ParsedAnswer, ToolCallParser, number_calls
from tunekit.data.token_bytes import TokenBytes
from tunekit.data.tokenizer import INCOMPLETE_CHAR, TextStreamer, Tokenizer
from tunekit.generation.requests import TokenOutput
from tunekit.generation.stop_strings import StopStrings
from tunekit.serving.request_fields import AnswerOptions

MIN_LOGPROB = -9999.0  # as in vLLM
ID_LENGTH = 9  # of a call: the templates of Mistral require it


class AnswerToken(NamedTuple):
    """A token of an answer, and the number of characters before it. A token inside a character has that of the one."""

    output: TokenOutput
    offset: int


class ForcedCallParser:
    """Parses answers that are constrained to be a call as a JSON object."""

    def parse(self, answer: str | Sequence[int]) -> ParsedAnswer:
        assert isinstance(answer, str)
        try:
            return ParsedAnswer("", None, number_calls([json_call(Scanner(answer).json("the tool call"))]))
        except CallError as error:  # cut off by the limit on tokens
            return ParsedAnswer(answer, None, (), str(error))

    def streamable(self, text: str) -> ParsedAnswer:
        return ParsedAnswer("")


@dataclass
class Choice:
    """One answer while it is generated. `parser` is None for completions, whose text is returned as it is."""

    tokenizer: Tokenizer
    options: AnswerOptions
    stop: StopStrings
    parser: ToolCallParser | ForcedCallParser | None
    prompt_tokens: Sequence[int]
    text: str = ""  # of all tokens; in chats with special tokens
    num_tokens: int = 0
    # That belong to the text, and the stop token if the request asks for token ids
    tokens: list[AnswerToken] = field(default_factory=list)
    finish_reason: str | None = None
    sent: ParsedAnswer = ParsedAnswer("")  # that was streamed

    def __post_init__(self) -> None:
        self.stop_tokens = self.options.stop_tokens(self.stop)
        self.streamer = TextStreamer(self.tokenizer, special=self.parser is not None)

    def add(self, output: TokenOutput) -> None:
        """Add a token. A stop token is not part of the text."""
        self.num_tokens += 1
        self.finish_reason = output.finish_reason
        is_stop_token = output.token in self.stop_tokens
        if self.options.includes_stop_token or not is_stop_token:
            self.tokens.append(AnswerToken(output, self.num_characters()))
        if not is_stop_token:
            self.text += self.streamer.add(output.token)
        if output.finish_reason is not None:
            self.text += self.streamer.flush()
            cut = self.stop.cut(self.text)
            self.text, self.finish_reason = cut, "stop" if cut != self.text else output.finish_reason

    def num_characters(self) -> int:
        """Number of complete characters of the text, also of those that the streamer holds back."""
        if self.options.num_logprobs is None:
            return 0  # nothing reads it, and decoding takes time
        return len(self.text) + len(self.streamer.pending_text().rstrip(INCOMPLETE_CHAR))

    def result(self) -> ParsedAnswer:
        """The complete answer."""
        if self.parser is None:
            return ParsedAnswer(self.text)
        parsed = self.parser.parse(self.text)
        if not self.options.allows_parallel_calls:
            parsed = parsed._replace(tool_calls=parsed.tool_calls[:1])
        if parsed.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return parsed

    def delta(self) -> ParsedAnswer:
        """The part of the answer that was not streamed yet; with tool calls after the last token."""
        if self.finish_reason is not None:
            available = self.result()
        elif self.parser is None:
            available = ParsedAnswer(self.stop.printable(self.text))
        else:
            available = self.parser.streamable(self.stop.printable(self.text))
        content = available.content[len(self.sent.content) :]
        reasoning = (available.reasoning_content or "")[len(self.sent.reasoning_content or "") :]
        self.sent = ParsedAnswer(
            self.sent.content + content, (self.sent.reasoning_content or "") + reasoning, available.tool_calls
        )
        return ParsedAnswer(content, reasoning or None, available.tool_calls)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def format_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with arguments in a JSON string and ids that are unique in a conversation."""
    alphabet = string.ascii_letters + string.digits
    return [
        {
            "id": call["id"]
            if ":" in (call["id"] or "")
            else "".join(secrets.choice(alphabet) for _ in range(ID_LENGTH)),
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]


def finite_logprob(logprob: float) -> float:
    """The log-probability; JSON has no -Infinity."""
    return max(logprob, MIN_LOGPROB)


class TokenNames:
    """Names and bytes of tokens in log-probabilities. `by_id`: names are such as `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer, by_id: bool, prefix: str = "") -> None:
        self.bytes, self.by_id, self.prefix = TokenBytes(tokenizer), by_id, prefix

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.by_id else self.bytes.label(token, self.prefix)


def chat_logprobs(names: TokenNames, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Log-probabilities of tokens in the format of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names(token), "logprob": finite_logprob(logprob), "bytes": list(names.bytes(token))}

    content = [
        {**entry(item.token, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top_logprobs]}
        for item, _ in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(names: TokenNames, tokens: Sequence[AnswerToken], length: int) -> dict[str, Any]:
    """Log-probabilities of tokens in the format of completions. `length` is that of the text, which stops may cut."""
    top = [{names(token): finite_logprob(logprob) for token, logprob in item.top_logprobs} for item, _ in tokens]
    return {
        "tokens": [names(item.token) for item, _ in tokens],
        "token_logprobs": [finite_logprob(item.logprob) for item, _ in tokens],
        "top_logprobs": top if any(top) else None,
        "text_offset": [min(offset, length) for _, offset in tokens],
    }
