"""What is learnt: character spans of a conversation that is rendered once, and the tokens in them.

Spans come from the template's own `{% generation %}` blocks, else from verified prefixes: what the template writes
before an assistant turn, with the generation prompt, must be how the whole conversation begins.
"""

import re
from collections.abc import Container, Mapping, Sequence
from os.path import commonprefix
from typing import Any, Literal

import tokenizers

from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

Learn = Literal["assistant", "last", "all"]
Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]
Tools = list[dict[str, Any]] | None
WAY_OUT = "set `learn: last`, or name a `template` with {% generation %} blocks"


def render(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, learn: Learn | Sequence[int]
) -> tuple[str, list[Span]]:
    """A conversation's text and its learnt character spans. `learn`: a choice, or the messages to learn, ascending."""
    template, context = tokenizer.template(tools), tokenizer.context(messages, tools)
    text = template.render(context)
    check_encodable(text)
    if learn == "all":
        return text, [(0, len(text))]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = {"assistant": turns, "last": turns[-1:]}[learn] if isinstance(learn, str) else learn
    if not wanted:
        raise UserError("nothing to learn: the conversation has no assistant message")
    if template.marked and set(wanted) <= set(turns):
        return text, generated(tokenizer, text, template.generated(text, context), turns, wanted)
    return text, [turn_span(tokenizer, text, messages, tools, index) for index in wanted]


def check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}), which no tokenizer reads"
        ) from None


def generated(
    tokenizer: Tokenizer, text: str, spans: list[Span], turns: Sequence[int], wanted: Sequence[int]
) -> list[Span]:
    """Spans of generation blocks. A stop token right behind a block belongs to it: the model must learn to end."""
    stops = [tokenizer.marks[token] for token in sorted(tokenizer.stops) if token in tokenizer.marks]
    ends = re.compile("|".join(map(re.escape, stops)))
    spans = [(start, match.end() if (match := ends.match(text, end)) else end) for start, end in spans]
    if len(wanted) == len(turns):
        return spans
    if len(spans) != len(turns):
        raise UserError(
            f"the chat template marks {len(spans)} generation blocks in {len(turns)} assistant turns: which is last?"
        )
    return [span for turn, span in zip(turns, spans, strict=True) if turn in wanted]


def turn_span(tokenizer: Tokenizer, text: str, messages: Messages, tools: Tools, index: int) -> Span:
    """Characters of one assistant turn, from behind the generation prompt to the end of its terminator."""
    prefix = tokenizer.render(messages[:index], tools, prompt=messages[index]["role"] == "assistant")
    if not text.startswith(prefix):
        raise UserError(
            f"messages[{index}]: no mask is sure: the chat template writes the conversation otherwise when it "
            f"prompts for this turn; {WAY_OUT}"
        )
    start = len(prefix)
    alone = text if index + 1 == len(messages) else tokenizer.render(messages[: index + 1], tools)
    marks = find_marks(tokenizer, alone, start)
    if text.startswith(alone):
        ended = marks and not alone[marks[-1].end() :].strip()
        return start, marks[-1].end() if ended else len(alone)
    bound = next_content(tokenizer, text, messages, tools, index)
    for mark in reversed(marks):
        end = text.find(mark[0], start, bound)
        if end >= 0:
            return start, end + len(mark[0])
    raise UserError(
        f"messages[{index}]: no mask is sure: the chat template writes this turn otherwise when more follows, "
        f"and no special token ends it; {WAY_OUT}"
    )


def find_marks(tokenizer: Tokenizer, text: str, start: int) -> list[re.Match[str]]:
    """Special tokens in a text from `start` on; where one begins with another, the longer one."""
    texts = sorted(tokenizer.marks.values(), key=len, reverse=True)
    return list(re.compile("|".join(map(re.escape, texts))).finditer(text, start)) if texts else []


def next_content(tokenizer: Tokenizer, text: str, messages: Messages, tools: Tools, index: int) -> int:
    """Where the text begins to depend on the message after `index`: the turn of `index` ends before."""
    following = dict(messages[index + 1])
    following["content"] = "b" if following["content"].lstrip().startswith("a") else "a"
    other = tokenizer.render([*messages[: index + 1], following, *messages[index + 2 :]], tools)
    return len(commonprefix([text, other]))


def tokens_in(encoding: tokenizers.Encoding, text: str, span: Span, special: Container[int]) -> Span:
    """The range of tokens whose characters lie in a span of the text.

    A token that reaches over a bound is left out but in two cases: it begins with white space before the span (a prompt
    that ends in a space), or it is a special token that took in the white space behind it.
    """
    start, end = span
    first = token_at(encoding, range(start, end), len(encoding))
    while first < len(encoding) and bounds(encoding, first)[0] < start and not joins(encoding, text, first, start):
        first += 1
    last = token_at(encoding, range(end - 1, start - 1, -1), -1)
    while last + 1 < len(encoding) and bounds(encoding, last + 1)[0] < end:  # a character of several bytes, in pieces
        last += 1
    over = last >= 0 and bounds(encoding, last)[1] > end and encoding.ids[last] not in special
    return first, max(first, last if over else last + 1)


def token_at(encoding: tokenizers.Encoding, places: range, default: int) -> int:
    """The token of the first of these characters that any token holds."""
    return next((token for at in places if (token := encoding.char_to_token(at)) is not None), default)


def joins(encoding: tokenizers.Encoding, text: str, token: int, start: int) -> bool:
    """Whether a token is only white space before `start` and more than that behind."""
    low, high = bounds(encoding, token)
    return not text[low:start].strip() and bool(text[start:high].strip())


def bounds(encoding: tokenizers.Encoding, token: int) -> Span:
    span = encoding.token_to_chars(token)
    assert span is not None, "a token without characters: the post-processor must be off"
    return span
