"""Prompts of requests: tokens, limits, and how their answers are constrained and parsed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from torch import Tensor

from tunekit.data.chat_template.chat_format import encode_conversation, with_chat_format
from tunekit.data.chat_template.tool_calls import ToolCallParser
from tunekit.data.tokenize import encode_text
from tunekit.data.tokenizer import TextTooLongError, Tokenizer
from tunekit.errors import UserError
from tunekit.serving.choices import ForcedCallParser
from tunekit.serving.constraints import Grammar, Grammars, call_schema
from tunekit.serving.errors import APIError, bad_request
from tunekit.serving.request_fields import (
    DEFAULT_EFFORT,
    EFFORT,
    AnswerOptions,
    ChatRequest,
    CompletionRequest,
    Structure,
)

Constraint = Callable[[Sequence[int]], Tensor | None] | None
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and how its answers are made. `constraints` has one entry for each choice."""

    tokens: Sequence[int]
    max_tokens: int
    parser: ToolCallParser | ForcedCallParser | None
    constraints: Sequence[Constraint]


class PromptMaker:
    """Makes prompts with the tokenizer and the chat template of a model or an adapter.

    `max_tokens` is the limit of the server on an answer.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, max_tokens: int | None) -> None:
        self.tokenizer = tokenizer.copy_with(max_tokens=max_model_len)
        self.max_model_len, self.max_tokens = max_model_len, max_tokens
        self.make_parser = lru_cache(maxsize=64)(self.parser_of)
        self.make_variant = lru_cache(maxsize=64)(self.with_template_kwargs)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer)

    def close(self) -> None:
        """End the threads that compile grammars, which would keep the process alive."""
        self.grammars.workers.shutdown(wait=False, cancel_futures=True)

    def with_template_kwargs(self, kwargs: str) -> "PromptMaker":
        """The prompt maker whose chat template has these values of its variables, a JSON object."""
        values = json.loads(kwargs)
        is_unread = EFFORT in values and EFFORT not in self.tokenizer.template().variables
        if is_unread and values.pop(EFFORT) != DEFAULT_EFFORT:
            raise bad_request(EFFORT, f"must be {DEFAULT_EFFORT}: the chat template of the model does not read it")
        tokenizer = with_chat_format(self.tokenizer, None, values)
        maker = PromptMaker(tokenizer, self.max_model_len, self.max_tokens)
        maker.grammars = self.grammars  # do not depend on the template
        return maker

    def make_prompts(self, request: ChatRequest | CompletionRequest) -> list[Prompt]:
        """The prompts of a request. Raises APIError."""
        if isinstance(request, ChatRequest):
            return [self.make_chat_prompt(request)]
        grammar = self.compile(request.options.structure)
        return [self.make_completion_prompt(text, request.options, grammar) for text in request.prompts]

    def make_chat_prompt(self, request: ChatRequest) -> Prompt:
        """Prompt of a conversation. Raises APIError."""
        if request.template_kwargs:
            make_variant = self.with_api_errors(self.make_variant, "messages")
            variant = make_variant(json.dumps(request.template_kwargs, sort_keys=True))
            return variant.make_chat_prompt(replace(request, template_kwargs={}))
        encode = self.with_api_errors(encode_conversation, "messages")
        tokens = encode(self.tokenizer, request.conversation.messages, request.tools)
        parser = ForcedCallParser() if request.is_forced else self.make_parser(json.dumps(request.tools))
        max_tokens = self.answer_length(len(tokens), request.options, "messages")
        structure = request.options.structure
        if request.is_forced:
            structure = Structure("json", call_schema(request.tools or []), "tools")
        constraints = make_constraints(self.compile(structure), request.options.num_choices)
        return Prompt(tokens, max_tokens, parser, constraints)

    def make_completion_prompt(self, text: str | list[int], options: AnswerOptions, grammar: Grammar | None) -> Prompt:
        """Prompt of a text or of token ids. Raises APIError."""
        tokens = self.encode_prompt(text)
        max_tokens = self.answer_length(len(tokens), options, "prompt")
        return Prompt(tokens, max_tokens, None, make_constraints(grammar, options.num_choices))

    def parser_of(self, tools: str) -> ToolCallParser:
        """Parser for tools as JSON. It is reused: detecting the format of calls renders a few probes."""
        return ToolCallParser(self.tokenizer, json.loads(tools))

    def encode_prompt(self, text: str | list[int]) -> list[int]:
        vocab = self.tokenizer.vocab_size or self.tokenizer.size
        encode = self.with_api_errors(encode_text, "prompt")
        tokens = encode(self.tokenizer, text) if isinstance(text, str) else text
        if not tokens:
            raise bad_request("prompt", "has no tokens. Send a text, or token ids such as that of BOS")
        if not all(0 <= token < vocab for token in tokens):
            raise bad_request("prompt", f"must have token ids from 0 to {vocab - 1}")
        return tokens

    def answer_length(self, num_prompt_tokens: int, options: AnswerOptions, param: str) -> int:
        """Limit on the tokens of an answer. Raises APIError if they do not fit into the context."""
        if self.max_tokens is not None and (options.max_tokens or 0) > self.max_tokens:
            problem = f"this server allows at most {self.max_tokens} tokens per answer, got {options.max_tokens}"
            raise bad_request(options.max_tokens_field, problem)
        space = self.max_model_len - num_prompt_tokens
        if space < (options.max_tokens or 1):
            answer = f" and {options.max_tokens_field}={options.max_tokens}" if options.max_tokens else ""
            sizes = (
                f"the prompt has {num_prompt_tokens} tokens{answer}, but the context has {self.max_model_len} tokens"
            )
            raise APIError(400, sizes, param, "context_length_exceeded")
        return options.max_tokens or min(space, self.max_tokens or space)

    def compile(self, structure: Structure | None) -> Grammar | None:
        """Grammar of all answers to a request. Raises APIError."""
        return None if structure is None else self.grammars.compile(structure)

    def with_api_errors(self, function: Callable[..., T], param: str) -> Callable[..., T]:
        """Turn errors of the user into status 400 for a field. Clients do not see the path of the template."""

        def run(*args: Any) -> T:
            try:
                return function(*args)
            except UserError as error:
                message = str(error)
                for _, path in self.tokenizer.templates.values():
                    message = message.removeprefix(f"{path}: ")
                code = "context_length_exceeded" if isinstance(error, TextTooLongError) else "invalid_value"
                raise APIError(400, message, param, code) from None

        return run


def make_constraints(grammar: Grammar | None, count: int) -> Sequence[Constraint]:
    """A constraint for each choice."""
    return [None] * count if grammar is None else grammar.constraints(count)
