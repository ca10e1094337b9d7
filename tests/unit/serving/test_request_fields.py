"""Fields of requests: wrong types and values are errors that name the field, never exceptions."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_families import write_family
from tunekit import assets
from tunekit.data.chat_template.chat_format import with_chat_format
from tunekit.data.tokenizer import Tokenizer
from tunekit.serving import constraints
from tunekit.serving.errors import APIError
from tunekit.serving.prompts import PromptMaker
from tunekit.serving.request_fields import (
    CHAT,
    FIXED,
    FIXED_CHAT,
    FIXED_COMPLETION,
    IGNORED,
    SHARED,
    parse_chat_request,
    parse_completion_request,
)

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALUES: list[Any] = [True, -1, 0, 1, 10**30, 0.5, 1e308, "", "x", [], {}, [None], [{}], {"type": "x"}, [[]], [1, 2]]
VALUES += [[{"role": 1}], {"type": "json_schema", "json_schema": {"schema": 1}}, [{"function": {"name": 2}}]]


@pytest.mark.parametrize("name", sorted(SHARED | CHAT | FIXED.keys() | FIXED_CHAT.keys() | FIXED_COMPLETION.keys()))
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


DEFAULTS = {
    "best_of": 1, "use_beam_search": False, "top_k": -1, "min_p": 0, "logit_bias": {}, "n": 1, "top_p": 1.0,
    "length_penalty": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "ignore_eos": False, "min_tokens": 0,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "stop_token_ids": [], "stop": [], "user": "u", "store": False, "service_tier": "auto", "stream": False,
    "prompt_logprobs": None, "truncate_prompt_tokens": None, "allowed_token_ids": None, "guided_json": None,
}  # fmt: skip
CHAT_DEFAULTS = {
    "reasoning_effort": "medium", "parallel_tool_calls": True, "logprobs": False, "top_logprobs": None, "audio": None,
    "echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False,
    "modalities": ["text"], "tools": None, "tool_choice": "auto", "response_format": {"type": "text"},
}  # fmt: skip
COMPLETION_DEFAULTS = {"suffix": None, "echo": False, "logprobs": None, "add_special_tokens": True}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def test_fields_at_their_default_values_are_accepted() -> None:
    for name, value in (DEFAULTS | CHAT_DEFAULTS).items():
        assert parse_chat_request(BODY | {name: value}).options.num_choices == 1, name
    for name, value in (DEFAULTS | COMPLETION_DEFAULTS).items():
        assert parse_completion_request(COMPLETION | {name: value}).options.num_choices == 1, name
    parse_chat_request(BODY | DEFAULTS | CHAT_DEFAULTS)
    parse_completion_request(COMPLETION | DEFAULTS | COMPLETION_DEFAULTS)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_other_values_are_refused_by_name(name: str) -> None:
    for parse, body in ((parse_chat_request, BODY), (parse_completion_request, COMPLETION)):
        with pytest.raises(APIError) as error:
            parse(body | {name: "other"})
        assert (error.value.status, error.value.param) == (400, name)


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    assert "reasoning_effort" not in IGNORED
    request = parse_chat_request(BODY | {"reasoning_effort": "high"})
    assert request.template_kwargs == {"reasoning_effort": "high"}
    maker = PromptMaker(Tokenizer.open(assets.MODELS["tunekit/nano"]), 64, None)
    with pytest.raises(APIError) as error:
        maker.make_prompts(request)
    assert error.value.param == "reasoning_effort"


def test_default_reasoning_effort_replaces_that_of_the_server(tmp_path: Path) -> None:
    """Templates that do not read the variable accept only the default value."""
    tokenizer = Tokenizer.open(write_family(tmp_path, "gpt_oss"))
    plain, high = (
        PromptMaker(with_chat_format(tokenizer, None, {"reasoning_effort": value}), 4096, None)
        for value in ("medium", "high")
    )
    requests = [parse_chat_request(BODY), parse_chat_request(BODY | {"reasoning_effort": "medium"})]
    tokens = [[maker.make_prompts(request)[0].tokens for request in requests] for maker in (plain, high)]
    assert tokens[0][0] == tokens[0][1] == tokens[1][1] != tokens[1][0]
    nano = PromptMaker(Tokenizer.open(assets.MODELS["tunekit/nano"]), 64, None)
    default, medium = (nano.make_prompts(request)[0].tokens for request in requests)
    assert default == medium


def test_prompts_far_beyond_the_context_are_refused_before_they_are_encoded() -> None:
    maker = PromptMaker(Tokenizer.open(assets.MODELS["tunekit/nano"]), 64, None)
    encoded: list[int] = []
    encode = maker.tokenizer.encode_texts
    vars(maker.tokenizer)["encode_texts"] = lambda texts, special=False: encoded.append(len(texts[0])) or encode(texts)
    for text in ("a b " * 1_000_000, "a b " * 200):
        for request in (
            parse_completion_request(COMPLETION | {"prompt": text}),
            parse_chat_request(BODY | {"messages": [{"role": "user", "content": text}]}),
        ):
            with pytest.raises(APIError) as error:
                maker.make_prompts(request)
            assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert max(encoded) < 1000


def test_one_grammar_serves_all_choices_and_prompts() -> None:
    maker = PromptMaker(Tokenizer.open(assets.MODELS["tunekit/nano"]), 64, None)
    pattern = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "a{3}"}}}
    request = parse_completion_request(COMPLETION | {"prompt": ["Hi", "Ho"], "n": 3, "response_format": pattern})
    prompts = maker.make_prompts(request)
    choices = [constraint for prompt in prompts for constraint in prompt.constraints]
    assert len({id(constraint) for constraint in choices}) == 6
    masks = [constraint([]) for constraint in choices if constraint is not None]
    assert all(mask is not None and masks[0] is not None and mask.equal(masks[0]) for mask in masks)
    first, second = choices[:2]
    assert first is not None and masks[0] is not None
    first([int(masks[0].nonzero()[0])])
    assert second is not None and masks[0].equal(second([]))  # the state of the others is their own


@pytest.mark.parametrize("pattern", ["a*" * 200_000, "(" * 100_000])
def test_large_patterns_are_refused_at_once(pattern: str) -> None:
    maker = PromptMaker(Tokenizer.open(assets.MODELS["tunekit/nano"]), 64, None)
    request = parse_chat_request(BODY | {"guided_regex": pattern, "n": 16})
    with pytest.raises(APIError) as error:
        maker.make_prompts(request)
    assert (error.value.status, error.value.param) == (400, "guided_regex")
    assert len(error.value.message) < 500


def test_a_slow_grammar_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads are busy, so that the grammar cannot be compiled."""
    monkeypatch.setattr(constraints, "COMPILE_SECONDS", 1e-6)
    maker, is_done = PromptMaker(Tokenizer.open(assets.MODELS["tunekit/nano"]), 64, None), threading.Event()
    for _ in range(2):
        maker.grammars.workers.submit(is_done.wait)
    with pytest.raises(APIError) as error:
        maker.make_prompts(parse_chat_request(BODY | {"guided_regex": "a"}))
    is_done.set()
    assert (error.value.status, error.value.param) == (400, "guided_regex")
