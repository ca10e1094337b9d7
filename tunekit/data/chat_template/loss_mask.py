"""Loss mask of a rendered conversation: character spans of target turns, and the tokens in them.

Spans come from the template's `{% generation %}` blocks, or else from the boundaries of turns in the rendered text
(turn_boundaries.py). Spans are cached by conversation shape and reused for a row if its text matches exactly
(template_pattern.py).
"""

from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np

from tunekit.data.chat_template.messages import Messages, Tools
from tunekit.data.chat_template.template_pattern import TemplatePattern, find_pattern, padded_sentinel
from tunekit.data.chat_template.turn_boundaries import (
    MASK_HINT,
    MAX_SENTINELS,
    RESERVED,
    SENTINEL_BASE,
    SENTINEL_NUMBERS,
    SENTINELS,
    AmbiguousMaskError,
    RenderedPrefixes,
    SentinelMessages,
    Span,
    reveal_text,
)
from tunekit.data.document import DocFlags
from tunekit.data.token_cache import TokenizerEncoding
from tunekit.data.tokenizer import Tokenizer, check_encodable
from tunekit.errors import UserError

PROBE_TOOLS = [{"type": "function", "function": {"name": "a", "description": "b", "parameters": {"type": "object"}}}]
MAX_PATTERNS = 500  # size of the cache of span patterns


class MaskedConversation(NamedTuple):
    """Rendered text, character spans of target turns, and warnings about them."""

    text: str
    spans: list[Span]
    doc_flags: DocFlags


class SpanPattern(NamedTuple):
    """Spans of all conversations of one shape. Without a pattern, spans are computed for each conversation.

    The last `num_blocks` spans of the pattern are the generation blocks; the others are the target spans.
    """

    pattern: TemplatePattern | None
    doc_flags: DocFlags = DocFlags(0)
    num_blocks: int = 0


def render_with_mask(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, targets: tuple[int, ...] | None
) -> MaskedConversation:
    """Render a conversation and find the spans of the messages `targets`, ascending indices; None: the full text.

    The end token of a turn is part of its span. Raise UserError if the mask would be ambiguous.
    """
    text, blocks = tokenizer.template(tools).render_with_spans(tokenizer.template_context(messages, tools))
    check_encodable(text)
    if targets is None:
        return MaskedConversation(text, [(0, len(text))], DocFlags(0))
    sentinels = SentinelMessages(tokenizer, messages, tools)
    span_pattern = get_span_pattern(tokenizer, sentinels, tools, targets)
    spans = None if span_pattern.pattern is None else span_pattern.pattern.match(text, sentinels.texts)
    if spans is not None:
        num_targets = len(spans) - span_pattern.num_blocks
        # Generation blocks are invisible in the text and may depend on what a message contains.
        if spans[num_targets:] == (generation_blocks(tokenizer, text, messages, tools) if blocks is None else blocks):
            return MaskedConversation(text, spans[:num_targets], span_pattern.doc_flags)
    if RESERVED.search(text):
        raise UserError("ambiguous loss mask: the row contains Tangut characters, which are reserved to find turns")
    return MaskedConversation(
        text, *find_target_spans(RenderedPrefixes(tokenizer, messages, tools, sentinels), targets)
    )


def text_before_last_message(tokenizer: Tokenizer, messages: Messages, tools: Tools, content: str) -> str:
    """Return the rendered text before the last message's content. Raise UserError if the content is rewritten."""
    rendered = RenderedPrefixes(tokenizer, messages, tools, SentinelMessages(tokenizer, messages, tools))
    start = rendered.text_start(rendered.count - 1)
    if start is None or not rendered.text[start:].lstrip().startswith(content.strip()):
        raise UserError("the chat template modifies the answer, so token positions in it are ambiguous")
    return rendered.text[:start]


def generation_blocks(tokenizer: Tokenizer, text: str, messages: Messages, tools: Tools) -> list[Span]:
    """Return the spans of the template's generation blocks; empty if it has none."""
    template = tokenizer.template(tools)
    if not template.has_generation_blocks:
        return []
    return template.generation_spans(text, tokenizer.template_context(messages, tools))


def get_span_pattern(
    tokenizer: Tokenizer, sentinels: SentinelMessages, tools: Tools, targets: tuple[int, ...]
) -> SpanPattern:
    """Return the cached pattern of conversations with this shape."""
    key = (repr(sentinels.shape), bool(tools), targets)
    if key not in tokenizer.shapes:
        if len(tokenizer.shapes) >= MAX_PATTERNS:
            tokenizer.shapes.clear()
        tokenizer.shapes[key] = find_span_pattern(tokenizer, sentinels, tools, targets)
    return tokenizer.shapes[key]


def find_span_pattern(
    tokenizer: Tokenizer, sentinels: SentinelMessages, tools: Tools, targets: tuple[int, ...]
) -> SpanPattern:
    if len(sentinels.texts) > MAX_SENTINELS:
        return SpanPattern(None)
    try:
        rendered = RenderedPrefixes(tokenizer, sentinels.shape, tools, sentinels)
        spans, doc_flags = find_target_spans(rendered, targets)
        probe = tokenizer.render(pad_sentinels(sentinels.shape), tools)
        probe = SENTINEL_NUMBERS.sub(lambda match: padded_sentinel(int(match[1])), probe)
        blocks = generation_blocks(tokenizer, rendered.text, sentinels.shape, tools)
        pattern = find_pattern(rendered.text, probe, [*spans, *blocks])
        if tools and pattern is not None:
            pattern = pattern.with_any_tools(reveal_text(tokenizer.render(sentinels.shape, PROBE_TOOLS)))
    except UserError:
        return SpanPattern(None)
    return SpanPattern(pattern, doc_flags, len(blocks))


def pad_sentinels(value: Any) -> Any:
    """Add whitespace around each sentinel of a text. Sentinels of names, which are longer, stay unchanged."""
    if isinstance(value, str):
        return SENTINELS.sub(
            lambda match: padded_sentinel(ord(match[1]) - SENTINEL_BASE) if len(match[0]) == 1 else match[0], value
        )
    if isinstance(value, dict):
        return {key: pad_sentinels(item) for key, item in value.items()}
    return [pad_sentinels(item) for item in value] if isinstance(value, list) else value


def find_target_spans(rendered: RenderedPrefixes, targets: tuple[int, ...]) -> tuple[list[Span], DocFlags]:
    """Return the spans of target turns in order, and warnings about them."""
    turns, doc_flags, remaining = [], DocFlags(0), targets
    if rendered.tokenizer.template(rendered.tools).has_generation_blocks:
        turns, doc_flags = generation_spans(rendered, targets)
        remaining = [index for index in targets if rendered.messages[index]["role"] != "assistant"]
    turns += [(rendered.turn_span(index), index) for index in remaining]
    all_ended = all(rendered.is_ended(span, index) for span, index in turns)
    return sorted(span for span, _ in turns), doc_flags if all_ended else doc_flags | DocFlags.MISSING_END_TOKEN


def generation_spans(
    rendered: RenderedPrefixes, targets: tuple[int, ...]
) -> tuple[list[tuple[Span, int | None]], DocFlags]:
    """Return the spans of generation blocks of target turns, each with its message index.

    A stop token right after a block is added to its span: the model must learn to stop.
    """
    blocks = generation_blocks(rendered.tokenizer, rendered.text, rendered.messages, rendered.tools)
    owners = [find_owner(rendered, block) for block in blocks]
    turns = {index for index, message in enumerate(rendered.messages) if message["role"] == "assistant"}
    if None in owners and not turns <= set(targets):
        raise AmbiguousMaskError(
            f"ambiguous loss mask: the chat template marks {len(blocks)} generation blocks in {len(turns)} assistant "
            f"turns, and one of them contains no message content. {MASK_HINT}"
        )
    spans, doc_flags = [], DocFlags(0)
    for block, index in zip(blocks, owners, strict=True):
        if index is None or index in targets:
            spans.append(((block[0], rendered.end_with_stop_token(block, index)), index))
            covered = index is not None and covers_prompt(rendered, index, block[0])
            doc_flags |= DocFlags.PROMPT_TRAINED if covered else DocFlags(0)
    return spans, doc_flags


def find_owner(rendered: RenderedPrefixes, block: Span) -> int | None:
    """Return the index of the first message whose content starts in a generation block."""
    starts = ((index, rendered.text_start(index)) for index in range(rendered.count))
    return next((index for index, start in starts if start is not None and block[0] <= start < block[1]), None)


def covers_prompt(rendered: RenderedPrefixes, index: int, start: int) -> bool:
    """Whether a block that starts at `start` covers a part of the generation prompt of its turn."""
    try:
        return start < rendered.turn_start(index)
    except AmbiguousMaskError:
        return False


def token_range(encoding: TokenizerEncoding, text: str, span: Span, special: Container[int]) -> Span:
    """Return the range of tokens whose characters are in a span of the text.

    A token that crosses a boundary is excluded, with two exceptions: before `start` it has only whitespace (a prompt
    that ends in a space), or it is a special token that includes the whitespace after `end`.
    """
    start, end = span
    num_tokens = len(encoding)
    first = token_at(encoding, range(start, end), num_tokens)
    while first < num_tokens and starts_before(encoding, text, first, start):
        first += 1
    last = token_at(encoding, range(end - 1, start - 1, -1), -1)
    while last + 1 < num_tokens and token_chars(encoding, last + 1)[0] < end:  # tokens of one multi-byte character
        last += 1
    overhangs = last >= 0 and token_chars(encoding, last)[1] > end and encoding.ids[last] not in special
    return first, max(first, last if overhangs else last + 1)


def is_first_token_merged(encoding: TokenizerEncoding, span: Span, mask: np.ndarray) -> bool:
    """Whether the first token of a span is not in its `mask` (tokens,), because it starts before the span."""
    first = token_at(encoding, range(*span), len(encoding))
    return first < len(encoding) and not mask[first]


def token_at(encoding: TokenizerEncoding, positions: range, default: int) -> int:
    """Return the token of the first of these characters that belongs to a token."""
    return next((token for position in positions if (token := encoding.char_to_token(position)) is not None), default)


def starts_before(encoding: TokenizerEncoding, text: str, token: int, start: int) -> bool:
    """Whether a token starts before `start`, and not only with whitespace."""
    low, high = token_chars(encoding, token)
    return low < start and (bool(text[low:start].strip()) or not text[start:high].strip())


def token_chars(encoding: TokenizerEncoding, token: int) -> Span:
    span = encoding.token_to_chars(token)
    assert span is not None, "token without characters: the tokenizer's post-processor must be disabled"
    return span
