"""Answers that follow a JSON Schema: the tokens that may come next."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from tunekit.data.tokenizer import Tokenizer
from tunekit.serving.errors import APIError


class JSONGrammars:
    """Compiles JSON Schemas for a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        return LLTokenizer(self.tokenizer.model.to_str(), n_vocab=self.tokenizer.vocab_size or self.tokenizer.size)

    def compile(self, schema: dict[str, Any], param: str) -> "JSONConstraint":
        """Constraint of one answer. Raises APIError for an invalid or unsupported schema, in the field `param`."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
            matcher = LLMatcher(self.vocabulary, grammar)
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"{param}: {error}", param, "invalid_json_schema") from None
        if matcher.is_error():
            raise APIError(400, f"{param}: {matcher.get_error()}", param, "invalid_json_schema")
        return JSONConstraint(matcher, self.vocabulary.vocab_size, self.tokenizer.stops)


class JSONConstraint:
    """The mask (vocab,) of tokens that may follow an answer. Stop tokens may follow a complete JSON value."""

    def __init__(self, matcher: LLMatcher, vocab: int, stops: frozenset[int]) -> None:
        self.matcher, self.vocab, self.stops, self.num_consumed = matcher, vocab, sorted(stops), 0

    def __call__(self, answer: Sequence[int]) -> Tensor | None:
        if self.num_consumed < len(answer):
            self.matcher.consume_tokens(list(answer[self.num_consumed :]))
            self.num_consumed = len(answer)
        if self.matcher.is_stopped() or self.matcher.is_error():
            mask = torch.zeros(self.vocab, dtype=torch.bool)
        else:  # one bit for each token, in words of 32 bits
            words = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
            mask = (words[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten()[: self.vocab].bool()
        mask[self.stops] = self.matcher.is_accepting() or not bool(mask.any())
        return mask if bool(mask.any()) else None


def call_schema(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """JSON Schema of a call of one of some tools: an object with `name` and `arguments`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
