"""Answers that follow a JSON Schema or a regular expression: the tokens that may come next."""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from tunekit.data.tokenizer import Tokenizer
from tunekit.serving.errors import APIError
from tunekit.serving.request_fields import Structure

MAX_STRUCTURE_BYTES = 256 * 2**10  # compiling takes up to 13 microseconds per byte of a pattern (llguidance 1.9)
COMPILE_SECONDS = 10.0  # deadline
MAX_ERROR_LENGTH = 300  # characters of llguidance's messages, which repeat the pattern
REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class Grammars:
    """Compiles structures of answers for a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        return LLTokenizer(self.tokenizer.model.to_str(), n_vocab=self.tokenizer.vocab_size or self.tokenizer.size)

    @cached_property
    def workers(self) -> ThreadPoolExecutor:
        """Threads that compile. A compilation cannot be interrupted: two slow ones make others wait or fail."""
        return ThreadPoolExecutor(2, "grammar")

    def compile(self, structure: Structure) -> "Grammar":
        """Grammar of the answers to a request. Raises APIError for an invalid, unsupported or too large structure."""
        code = "invalid_json_schema" if structure.kind == "json" else "invalid_value"

        def error(problem: str) -> APIError:
            message = " ".join(problem.split())[:MAX_ERROR_LENGTH]
            return APIError(400, f"{structure.param}: {message}", structure.param, code)

        if (size := len(json.dumps(structure.value))) > MAX_STRUCTURE_BYTES:
            raise error(f"must have at most {MAX_STRUCTURE_BYTES} bytes, got {size}")
        try:
            matcher = self.workers.submit(self.build_matcher, structure).result(COMPILE_SECONDS)
        except TimeoutError:
            raise error(f"cannot be compiled within {COMPILE_SECONDS:g} seconds. Simplify its patterns.") from None
        except (ValueError, RecursionError) as problem:
            raise error(str(problem)) from None
        if matcher.is_error():
            raise error(matcher.get_error())
        return Grammar(matcher, self.vocabulary.vocab_size, self.tokenizer.stops)

    def build_matcher(self, structure: Structure) -> LLMatcher:
        return LLMatcher(self.vocabulary, to_grammar(structure))


@dataclass(frozen=True)
class Grammar:
    """A compiled structure."""

    matcher: LLMatcher
    vocab: int
    stops: frozenset[int]

    def constraints(self, count: int) -> list["Constraint"]:
        """Constraints of several answers."""
        return [Constraint(self.matcher.deep_copy(), self.vocab, self.stops) for _ in range(count)]


def to_grammar(structure: Structure) -> str:
    """Grammar of llguidance. Raises ValueError."""
    if structure.kind == "json":
        return LLMatcher.grammar_from_json_schema(structure.value, defaults={"whitespace_flexible": False})
    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(structure.value)
    return LLMatcher.grammar_from_regex("|".join(REGEX_SYNTAX.sub(r"\\\g<0>", text) for text in structure.value))


class Constraint:
    """The mask (vocab,) of tokens that may follow an answer. Stop tokens may follow a complete one."""

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
                "arguments": close_objects(tool["function"].get("parameters") or {"properties": {}, "type": "object"}),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def close_objects(schema: Any) -> Any:
    """The schema without properties that it does not name, unless it has keywords about them.

    A model that may write further properties may write them without end. vLLM's grammars do the same.
    """
    if not isinstance(schema, dict):
        return schema
    closed = {key: close_below(key, value) for key, value in schema.items()}
    is_open = closed.keys() & {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref"}
    return closed | ({"additionalProperties": False} if "properties" in closed and not is_open else {})


def close_below(key: str, value: Any) -> Any:
    """Close the schemas under one keyword."""
    if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return {name: close_objects(child) for name, child in value.items()}
    if key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
        return [close_objects(child) for child in value]
    return close_objects(value) if key in ("items", "additionalProperties") else value
