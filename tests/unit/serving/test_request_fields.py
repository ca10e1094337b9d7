"""Fields of requests: wrong types and values are errors that name the field, never exceptions."""

import itertools
from typing import Any

import pytest

from tunekit import assets
from tunekit.data.tokenizer import Tokenizer
from tunekit.serving.errors import APIError
from tunekit.serving.prompts import PromptMaker
from tunekit.serving.request_fields import CHAT, FIXED, SHARED, parse_chat_request, parse_completion_request

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALUES: list[Any] = [True, -1, 0, 1, 10**30, 0.5, 1e308, "", "x", [], {}, [None], [{}], {"type": "x"}, [[]], [1, 2]]
VALUES += [[{"role": 1}], {"type": "json_schema", "json_schema": {"schema": 1}}, [{"function": {"name": 2}}]]


@pytest.mark.parametrize("name", sorted(SHARED | CHAT | FIXED.keys()))
def test_any_value_is_accepted_or_an_api_error(name: str) -> None:
    for value in VALUES:
        for parse, body in ((parse_chat_request, BODY), (parse_completion_request, {"model": "m", "prompt": "Hi"})):
            try:
                parse(body | {name: value})
            except APIError as error:
                assert error.status == 400 and error.message and error.body["error"]["message"] == error.message


def test_messages_that_are_not_a_list_are_an_error() -> None:
    for messages in ("Hi", '[{"role": "user", "content": "Hi"}]', None, {}):
        with pytest.raises(APIError, match="list of messages") as error:
            parse_chat_request(BODY | {"messages": messages})
        assert error.value.param == "messages"


@pytest.mark.parametrize(("tokens", "problem"), [([], "no tokens"), ([1, 10**6], "token ids from 0 to")])
def test_prompt_without_tokens_or_with_unknown_ones_is_an_error(tokens: list[int], problem: str) -> None:
    maker = PromptMaker(Tokenizer.open(assets.MODELS["tunekit/nano"]), 64, None)
    with pytest.raises(APIError, match=problem):
        maker.encode_prompt(tokens)


def test_pairs_of_fields_are_accepted_or_an_api_error() -> None:
    values = {
        "tools": [[TOOL], None],
        "tool_choice": ["required", "none", "auto", {"function": {"name": "f"}}, {}, 1],
        "response_format": [{"type": "json_object"}, None],
        "logprobs": [True, None],
        "top_logprobs": [1, None],
    }
    for combination in itertools.product(*values.values()):
        try:
            parse_chat_request(BODY | dict(zip(values, combination, strict=True)))
        except APIError as error:
            assert error.param in values


def test_null_is_the_same_as_no_field() -> None:
    nulls = dict.fromkeys((SHARED | CHAT) - BODY.keys())
    plain = parse_chat_request(BODY | {"seed": 1})
    assert parse_chat_request(nulls | BODY | {"seed": 1}) == plain
    assert (plain.options.sampling.temperature, plain.options.max_tokens, plain.tools) == (1.0, None, None)


def test_names_of_openai_and_vllm() -> None:
    fields = {"max_completion_tokens": 5, "max_tokens": 9, "stop": "\n", "top_k": -1, "min_p": 0.1, "seed": 3}
    request = parse_chat_request(BODY | fields | {"user": "u", "frequency_penalty": 0})
    sampling = request.options.sampling
    assert (request.options.max_tokens, sampling.stop_strings, sampling.top_k) == (5, ("\n",), None)
    assert (sampling.min_p, sampling.seed) == (0.1, 3)
    assert parse_completion_request({"model": "m", "prompt": [[1, 2], "a"]}).prompts == [[1, 2], "a"]
    assert parse_completion_request({"model": "m", "prompt": [1, 2]}).prompts == [[1, 2]]
