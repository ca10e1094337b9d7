"""Parser of the completions of a server: whatever it returns is a valid answer or one error."""

import re
from typing import Any, NamedTuple

from tunekit.generation.requests import Answer, FinishReason
from tunekit.rollouts.openai_client import ResponseError, shorten_text

TOKEN_ID = re.compile(r"token_id:([0-9]{1,20})")  # a token in log-probabilities with return_tokens_as_token_ids
MIN_LOGPROB, MAX_LOGPROB = -1e30, 1e-3  # -9999.0 is that of an excluded token in vLLM; above 0: rounding of the server
ABORTED = "abort"  # finish reason of vLLM and SGLang for answers that end early, such as by an update of weights
NO_TOKEN_IDS = (
    "the responses have no token ids (`token_ids` in choices, or tokens such as 'token_id:7'). Use vLLM, `tune serve`, "
    "or another server that supports return_token_ids or return_tokens_as_token_ids"
)


class Completion(NamedTuple):
    """The sampled tokens of a response, with their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]  # most likely tokens, best first; empty if none were requested
    finish_reason: FinishReason


def parse_completion(response: Any, answer: Answer, model: str, vocab_size: int) -> Completion | None:
    """Tokens of a response; None if the server has aborted the answer. Raises ResponseError for anything else."""
    fields = expect_object(response, "the response")
    if (name := fields.get("model")) not in (None, model):
        raise ResponseError(f"the answer is of the model {format_value(name)} instead of {model!r}")
    choices = expect_list(fields.get("choices"), "choices")
    if len(choices) != 1:
        raise ResponseError(f"expected one choice, got {len(choices)}")
    choice = expect_object(choices[0], "choices[0]")
    if choice.get("index", 0) != 0:
        raise ResponseError(f"expected the choice with index 0, got {format_value(choice['index'])}")
    for prompt in (fields.get("prompt_token_ids"), choice.get("prompt_token_ids")):
        if prompt is not None and prompt != answer.context:
            raise ResponseError("prompt_token_ids are not the token ids of the request: the server changes prompts")
    reason = choice.get("finish_reason")
    if reason == ABORTED:
        return None
    if reason != "stop" and reason != "length":
        raise ResponseError(f"expected finish_reason 'stop' or 'length', got {format_value(reason)}")
    logprobs = expect_object(choice.get("logprobs") or {}, "logprobs")
    tokens = parse_tokens(choice.get("token_ids"), logprobs.get("tokens"), vocab_size)
    values = parse_logprobs(logprobs.get("token_logprobs"), len(tokens))
    top = parse_top_logprobs(logprobs.get("top_logprobs"), len(tokens), answer.request.num_logprobs, vocab_size)
    return Completion(tokens, values, top, reason)


def parse_tokens(ids: Any, texts: Any, vocab_size: int) -> list[int]:
    """Token ids of an answer, which are a field of their own or in the texts of tokens."""
    if ids is None:
        ids = [parse_token_id(text) for text in expect_list(texts or [], "logprobs.tokens")]
    if not expect_list(ids, "token_ids"):
        raise ResponseError(NO_TOKEN_IDS)
    for token in ids:
        check_token(token, vocab_size)
    return ids


def parse_token_id(text: Any) -> int:
    match = TOKEN_ID.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ResponseError(NO_TOKEN_IDS)
    return int(match[1])


def check_token(token: Any, vocab_size: int) -> None:
    if type(token) is not int or not 0 <= token < vocab_size:
        problem = f"token id {format_value(token)} is not one of the {vocab_size:,} tokens of the model"
        raise ResponseError(f"{problem}: the server has another model or tokenizer")


def parse_logprobs(values: Any, num_tokens: int) -> list[float]:
    """Log-probabilities of the sampled tokens."""
    if not values:
        raise ResponseError("the responses have no log-probabilities of the sampled tokens")
    if len(expect_list(values, "token_logprobs")) != num_tokens:
        problem = f"{num_tokens} token ids have {len(values)} log-probabilities"
        raise ResponseError(f"{problem}: the server must report stop tokens in both")
    return [parse_logprob(value) for value in values]


def parse_logprob(value: Any) -> float:
    if type(value) not in (int, float) or not MIN_LOGPROB <= value <= MAX_LOGPROB:
        raise ResponseError(f"expected a finite log-probability, at most 0, got {format_value(value)}")
    return float(value)


def parse_top_logprobs(rows: Any, num_tokens: int, count: int, vocab_size: int) -> list[list[tuple[int, float]]]:
    """The most likely tokens of each position, best first; empty if none were requested."""
    if not count or not rows:
        return []
    if len(expect_list(rows, "top_logprobs")) != num_tokens:
        raise ResponseError(f"{num_tokens} token ids have {len(rows)} top_logprobs")
    return [parse_row(expect_object(row, "top_logprobs"), count, vocab_size) for row in rows]


def parse_row(row: dict[str, Any], count: int, vocab_size: int) -> list[tuple[int, float]]:
    pairs = [(parse_token_id(text), parse_logprob(value)) for text, value in row.items()]
    for token, _ in pairs:
        check_token(token, vocab_size)
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


def parse_models(response: Any) -> list[dict[str, Any]]:
    """Models of a server, adapters too, each with its name as `id`."""
    entries = expect_list(expect_object(response, "the response").get("data"), "data")
    for entry in entries:
        if not isinstance(expect_object(entry, "data").get("id"), str):
            raise ResponseError(f"expected a model name in id, got {format_value(entry.get('id'))}")
    return entries


def expect_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ResponseError(
            f"not a response of the OpenAI protocol: {name} is {format_value(value)} instead of an object"
        )
    return value


def expect_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ResponseError(f"not a response of the OpenAI protocol: {name} is {format_value(value)} instead of a list")
    return value


def format_value(value: Any) -> str:
    """A JSON value for error messages: lists and objects by their type, as they may be large."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "null" if value is None else shorten_text(repr(value[:50] if isinstance(value, str) else value))
