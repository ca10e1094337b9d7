"""What is learnt of a conversation that is rendered once: spans of characters, and the tokens in them.

Spans come from the template's own `{% generation %}` blocks, else from where turns stand in what it writes (turns.py).
What was found of one conversation is used for others of its shape, where it is sure for them too (layout.py).
"""

from collections.abc import Container, Sequence
from typing import Any, Literal, NamedTuple

from tunekit.data.chat_template.template_pattern import TemplatePattern, find_pattern, padded
from tunekit.data.chat_template.turn_boundaries import (
    HIDDEN,
    HIDES,
    MOST,
    NUMBERS,
    WAY_OUT,
    AmbiguousMaskError,
    Messages,
    RenderedPrefixes,
    SentinelMessages,
    Span,
    Tools,
    reveal_text,
)
from tunekit.data.doc_flags import DocFlags
from tunekit.data.token_cache import TokenizerEncoding
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

Learn = Literal["assistant", "last", "all"]
OTHER_TOOLS = [{"type": "function", "function": {"name": "a", "description": "b", "parameters": {"type": "object"}}}]
SHAPES = 500  # layouts that are kept


class MaskedConversation(NamedTuple):
    """A conversation's text, its learnt character spans, and what was noticed of these."""

    text: str
    spans: list[Span]
    signs: DocFlags


class SpanPattern(NamedTuple):
    """What all conversations of a shape have in common. Without a layout, each is looked at for itself.

    The last `blocks` spans of the layout are the generation blocks of the template, behind what is learnt.
    """

    layout: TemplatePattern | None
    signs: DocFlags = DocFlags(0)
    blocks: int = 0


def render_with_mask(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, learn: Learn | Sequence[int]
) -> MaskedConversation:
    """A conversation's text and what is learnt of it. `learn`: a choice, or the messages to learn, ascending.

    A turn's end token is learnt with it. UserError if no mask is sure.
    """
    text, blocks = tokenizer.template(tools).written(tokenizer.context(messages, tools))
    check_encodable(text)
    if learn == "all":
        return MaskedConversation(text, [(0, len(text))], DocFlags(0))
    wanted = wanted_turns(messages, learn) if isinstance(learn, str) else tuple(learn)
    if not wanted:
        raise UserError("nothing to learn: the conversation has no assistant message")
    hidden = SentinelMessages(tokenizer, messages, tools)
    found = known(tokenizer, hidden, tools, wanted)
    spans = None if found.layout is None else found.layout.fit(text, hidden.texts)
    if spans is not None:
        count = len(spans) - found.blocks
        # Where blocks begin cannot be seen in a text, and a template may mark by what a message says.
        if spans[count:] == (blocks_of(tokenizer, text, messages, tools) if blocks is None else blocks):
            return MaskedConversation(text, spans[:count], found.signs)
    if HIDES.search(text):
        raise UserError(
            "no mask is sure: the row holds Tangut characters, behind which texts are hidden to find the turns"
        )
    return MaskedConversation(text, *find(RenderedPrefixes(tokenizer, messages, tools, hidden), wanted))


def text_before_last_message(tokenizer: Tokenizer, messages: Messages, tools: Tools, said: str) -> str:
    """What a template writes before the text of the last message, which is `said`. UserError if that is not sure."""
    writing = RenderedPrefixes(tokenizer, messages, tools, SentinelMessages(tokenizer, messages, tools))
    begin = writing.begins(writing.count - 1)
    if begin is None or not writing.text[begin:].lstrip().startswith(said.strip()):
        raise UserError("the chat template does not write the answer as it is, so no place in it is sure")
    return writing.text[:begin]


def blocks_of(tokenizer: Tokenizer, text: str, messages: Messages, tools: Tools) -> list[Span]:
    """The generation blocks of a template that has any."""
    template = tokenizer.template(tools)
    return template.generated(text, tokenizer.context(messages, tools)) if template.marked else []


def wanted_turns(messages: Messages, learn: str) -> tuple[int, ...]:
    turns = tuple(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return turns[-1:] if learn == "last" else turns


def check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}), which no tokenizer reads"
        ) from None


def known(tokenizer: Tokenizer, hidden: SentinelMessages, tools: Tools, wanted: tuple[int, ...]) -> SpanPattern:
    """What holds for conversations like this one, found once."""
    key = (repr(hidden.shape), bool(tools), wanted)
    if key not in tokenizer.shapes:
        if len(tokenizer.shapes) >= SHAPES:
            tokenizer.shapes.clear()
        tokenizer.shapes[key] = study(tokenizer, hidden, tools, wanted)
    return tokenizer.shapes[key]


def study(tokenizer: Tokenizer, hidden: SentinelMessages, tools: Tools, wanted: tuple[int, ...]) -> SpanPattern:
    if len(hidden.texts) > MOST:
        return SpanPattern(None)
    try:
        writing = RenderedPrefixes(tokenizer, hidden.shape, tools, hidden)
        spans, signs = find(writing, wanted)
        probe = tokenizer.render(pad(hidden.shape), tools)
        probe = NUMBERS.sub(lambda match: padded(int(match[1])), probe)
        blocks = blocks_of(tokenizer, writing.text, hidden.shape, tools)
        found = find_pattern(writing.text, probe, [*spans, *blocks])
        if tools and found is not None:
            found = found.freed(reveal_text(tokenizer.render(hidden.shape, OTHER_TOOLS)))
    except UserError:
        return SpanPattern(None)
    return SpanPattern(found, signs, len(blocks))


def pad(value: Any) -> Any:
    """Messages with white space around each hidden text, but for names."""
    if isinstance(value, str):
        return HIDES.sub(lambda run: padded(ord(run[1]) - HIDDEN) if len(run[0]) == 1 else run[0], value)
    if isinstance(value, dict):
        return {key: pad(item) for key, item in value.items()}
    return [pad(item) for item in value] if isinstance(value, list) else value


def find(writing: RenderedPrefixes, wanted: tuple[int, ...]) -> tuple[list[Span], DocFlags]:
    """The learnt spans of what a template writes, and what is to be told of them."""
    turns, signs, rest = [], DocFlags(0), wanted
    if writing.tokenizer.template(writing.tools).marked:
        turns, signs = generated(writing, wanted)
        rest = [index for index in wanted if writing.messages[index]["role"] != "assistant"]
    turns += [(writing.turn(index), index) for index in rest]
    ended = all(writing.ended(span, index) for span, index in turns)
    return sorted(span for span, _ in turns), signs if ended else signs | DocFlags.UNENDED


def generated(writing: RenderedPrefixes, wanted: tuple[int, ...]) -> tuple[list[tuple[Span, int | None]], DocFlags]:
    """Spans of generation blocks, and whose they are.

    A stop token right behind a block belongs to it: the model must learn to end.
    """
    blocks = blocks_of(writing.tokenizer, writing.text, writing.messages, writing.tools)
    owners = [owner(writing, block) for block in blocks]
    turns = wanted_turns(writing.messages, "assistant")
    if None in owners and not set(turns) <= set(wanted):
        raise AmbiguousMaskError(
            f"no mask is sure: the chat template marks {len(blocks)} generation blocks in {len(turns)} assistant "
            f"turns, and one without a message's text: whose is it? {WAY_OUT}"
        )
    found, signs = [], DocFlags(0)
    for block, index in zip(blocks, owners, strict=True):
        if index is None or index in wanted:
            found.append(((block[0], writing.stop(block, index)), index))
            signs |= DocFlags.PROMPT_LEARNT if index is not None and prompted(writing, index, block[0]) else DocFlags(0)
    return found, signs


def owner(writing: RenderedPrefixes, block: Span) -> int | None:
    """The first message whose text begins in a generation block."""
    places = ((index, writing.begins(index)) for index in range(writing.count))
    return next((index for index, place in places if place is not None and block[0] <= place < block[1]), None)


def prompted(writing: RenderedPrefixes, index: int, start: int) -> bool:
    """Whether a block that begins at `start` takes in what the prompt for its turn writes."""
    try:
        return start < writing.start(index)
    except AmbiguousMaskError:
        return False


def token_range(encoding: TokenizerEncoding, text: str, span: Span, special: Container[int]) -> Span:
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


def token_at(encoding: TokenizerEncoding, places: range, default: int) -> int:
    """The token of the first of these characters that any token holds."""
    return next((token for at in places if (token := encoding.char_to_token(at)) is not None), default)


def joins(encoding: TokenizerEncoding, text: str, token: int, start: int) -> bool:
    """Whether a token is only white space before `start` and more than that behind."""
    low, high = bounds(encoding, token)
    return not text[low:start].strip() and bool(text[start:high].strip())


def bounds(encoding: TokenizerEncoding, token: int) -> Span:
    span = encoding.token_to_chars(token)
    assert span is not None, "a token without characters: the post-processor must be off"
    return span
