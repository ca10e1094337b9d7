"""Format of the tool calls that a chat template writes, found by rendering probe calls instead of by model family."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from tunekit.data.chat_template.call_formats import (
    ARGUMENT_KEYS,
    CALL_ID_PLACE,
    KNOWN_FORMATS,
    NAME_KEYS,
    CallError,
    CallFormat,
    json_call,
)
from tunekit.data.chat_template.messages import Message, Tools
from tunekit.data.chat_template.template_features import ANSWER, CALL_ID, QUESTION, try_render
from tunekit.data.tokenizer import Tokenizer

NAMES = ("edcrfv", "edctgb")  # strings that no template contains
ARGUMENTS = {"ujmyhn": "ikolpz", "qwsxcd": "bgtnhy"}
KEYS, VALUES = tuple(ARGUMENTS), tuple(ARGUMENTS.values())


def probe_call(index: int) -> dict[str, Any]:
    return {"type": "function", "id": CALL_ID.format(index), "function": {"name": NAMES[index], "arguments": ARGUMENTS}}


def render_calls(tokenizer: Tokenizer, tools: Tools, calls: list[dict[str, Any]]) -> str:
    """Text of an answer that consists of calls, without the start of the turn; empty if the template fails."""
    question: Message = {"role": "user", "content": QUESTION}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    text = try_render(tokenizer, [question, answer], tools).rpartition(QUESTION)[2]
    prompt = try_render(tokenizer, [question], tools, prompt=True).rpartition(QUESTION)[2]
    plain = try_render(tokenizer, [question, {"role": "assistant", "content": ANSWER}], tools)
    heads = [prompt, plain.rpartition(QUESTION)[2].partition(ANSWER)[0], at_tag(commonprefix([prompt, text]), text)]
    return text[max((len(head) for head in heads if text.startswith(head)), default=0) :]


def at_tag(prefix: str, text: str) -> str:
    """Shorten a prefix of a text that ends inside a tag to the start of that tag."""
    start = max(prefix.rfind("<"), prefix.rfind("["))
    is_inside = start >= 0 and not {">", "]"} & set(prefix[start:]) and len(prefix) < len(text)
    return prefix[:start] if is_inside else prefix


@lru_cache(maxsize=32)
def known_formats(tokenizer: Tokenizer) -> tuple[CallFormat, ...]:
    """Known formats whose start is a token of the model or a part of its chat template."""
    template_text = "\n".join(text for text, _ in tokenizer.templates.values())
    vocabulary = {token.content for token in tokenizer.model.get_added_tokens_decoder().values()}
    return tuple(item for item in KNOWN_FORMATS if item.trigger in vocabulary or item.trigger in template_text)


def find_formats(tokenizer: Tokenizer, tools: Tools) -> list[CallFormat]:
    """Formats in which a model may write calls, that of its chat template first.

    If the template writes no calls, JSON alone is a call too. If the vocabulary shows no format either, all are tried.
    """
    detected = detect_format(tokenizer, tools)
    known = known_formats(tokenizer)
    if detected is not None:
        return [detected, *known]
    return [*(known or KNOWN_FORMATS), CallFormat("json")]


def detect_format(tokenizer: Tokenizer, tools: Tools) -> CallFormat | None:
    """Format of the calls that a template writes; None if it writes none."""
    text = render_calls(tokenizer, tools, [probe_call(0)])
    if NAMES[0] not in text or VALUES[0] not in text:
        return None
    return parse_probe(tokenizer, text, render_calls(tokenizer, tools, [probe_call(0), probe_call(1)]))


def parse_probe(tokenizer: Tokenizer, text: str, pair: str) -> CallFormat | None:
    """Format of a rendered probe call. `pair` is the rendering of two calls; empty if the template writes only one."""
    unquoted = (item for item in KNOWN_FORMATS if item.kind == "unquoted" and item.trigger in text)
    if result := next(unquoted, None):
        return result
    for start, value, end in json_values(text):
        if NAMES[0] in json.dumps(value) and is_probe_call(value):
            return json_format(tokenizer, text[:start], text[end:], pair)
        if value == ARGUMENTS:
            name = text.index(NAMES[0])
            middle = text[name + len(NAMES[0]) : start].replace(CALL_ID.format(0), CALL_ID_PLACE)
            result = CallFormat("named", text[:name], before_stop(tokenizer, text[end:]), middle=middle)
            return with_section(result, *between_calls(pair, json.dumps(ARGUMENTS)))
    return text_format(tokenizer, text, pair)


def json_values(text: str) -> Iterator[tuple[int, Any, int]]:
    """Yield JSON objects in a text with their positions."""
    start = text.find("{")
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
            yield start, value, end
        except ValueError:
            pass
        start = text.find("{", start + 1)


def is_probe_call(value: Any) -> bool:
    try:
        call = json_call(value)
    except CallError:
        return False
    return any(key in json.dumps(value) for key in (*NAME_KEYS, *ARGUMENT_KEYS)) and bool(call["function"]["arguments"])


def json_format(tokenizer: Tokenizer, head: str, tail: str, pair: str) -> CallFormat:
    start, end = head.strip().removesuffix("[").strip(), before_stop(tokenizer, tail).strip(" \n],")
    is_repeated = bool(start) and pair.count(start) == 2
    return CallFormat("json", start, end) if is_repeated else CallFormat("json", section=start, section_end=end)


def before_stop(tokenizer: Tokenizer, tail: str) -> str:
    """Text before the stop token that ends the turn."""
    match = tokenizer.stop_texts.search(tail)
    return tail[: match.start()] if match else tail


def between_calls(pair: str, end: str) -> tuple[str, str]:
    """Text from the arguments of the first of two calls to the name of the second, and after the second."""
    middle, _, tail = pair.partition(NAMES[0])[2].partition(NAMES[1])
    return middle.rpartition(end)[2], tail.rpartition(end)[2]


def with_section(result: CallFormat, between: str, tail: str) -> CallFormat:
    """Separate the text before the first call from that before each call. `between` is empty if unknown."""
    if not between:
        return result
    start = from_tag(commonsuffix(result.start, between), result.start)
    call_end = between[: len(between) - len(start)]
    section = result.start[: len(result.start) - len(start)]
    section_end = result.end.removeprefix(call_end.rstrip()).strip() if section else ""
    return replace(result, start=start, section=section, end=call_end.strip(" \n,"), section_end=section_end)


def commonsuffix(first: str, second: str) -> str:
    return commonprefix([first[::-1], second[::-1]])[::-1]


def from_tag(suffix: str, text: str) -> str:
    """Shorten a suffix of a text that starts inside a tag to its next tag."""
    is_whole = suffix == text and suffix[:1] not in (">", "]")
    if is_whole or suffix[:1] in ("", "<", "["):
        return suffix
    positions = [position for position in (suffix.find("<"), suffix.find("[")) if position >= 0]
    return suffix[min(positions) :] if positions else suffix


def text_format(tokenizer: Tokenizer, text: str, pair: str) -> CallFormat | None:
    """Format of a call whose arguments are not JSON: Python, or one text per argument."""
    parts, rest = [], text
    for literal in (NAMES[0], KEYS[0], VALUES[0], KEYS[1], VALUES[1]):
        part, result, rest = rest.partition(literal)
        if not result:
            return None
        parts.append(part)
    start, middle, key_end, between, key_end_again = parts
    if middle.strip().removeprefix(".call") == "(":
        return CallFormat("python", start.strip().removesuffix("["), before_stop(tokenizer, rest).strip(" \n)]\"'"))
    if key_end != key_end_again:
        return None
    key_start = from_tag(commonsuffix(middle, between), middle)
    value_end = between[: len(between) - len(key_start)]
    end = before_stop(tokenizer, rest).removeprefix(value_end.rstrip())
    middle = middle[: len(middle) - len(key_start)]
    result = CallFormat("parameters", start, end, "", "", middle, key_start, key_end, value_end)
    between_names, tail = between_calls(pair, VALUES[1] + value_end.rstrip())
    return with_section(result, between_names, tail)
