"""Conversations and texts to masked text, and masked text to tokenized documents."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from tunekit.data.chat_template import loss_mask
from tunekit.data.chat_template.messages import Conversation
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.chat_template.template_warnings import find_doc_flags
from tunekit.data.document import DocFlags, Document
from tunekit.data.token_cache import TokenizerEncoding
from tunekit.data.tokenizer import Tokenizer, check_encodable
from tunekit.errors import UserError

Role = Literal["system", "developer", "user", "assistant", "tool"]
TrainOn = Literal["assistant", "last", "all", "per_message"] | tuple[Role, ...]


class MaskedText(NamedTuple):
    """Text and the character spans of its target tokens.

    `end_token` is the EOS token of plain text, which also gets the tokenizer's BOS token; None for text that a chat
    template has rendered. `values` are the label or margin, or one label (stepwise, without EOS) or weight for each
    span. `document` has the tokens of a row that is already tokenized; `text` is then empty.
    """

    text: str
    target_spans: list[loss_mask.Span]
    doc_flags: DocFlags = DocFlags(0)
    end_token: int | None = None
    values: tuple[float, ...] = ()
    document: Document | None = None

    @property
    def is_stepwise(self) -> bool:
        """Whether each span is a step with its own label."""
        return bool(self.doc_flags & DocFlags.STEPWISE)

    @property
    def is_continuable(self) -> bool:
        """Whether it is plain text without a prompt, whose windows need no context from the previous one."""
        return self.end_token is not None and self.target_spans[0][0] == 0


def render_conversation(tokenizer: Tokenizer, conversation: Conversation, train_on: TrainOn) -> MaskedText:
    """Render a conversation with the chat template."""
    turns, tools = target_turns(conversation, train_on), conversation.tools
    messages = detect_features(tokenizer.template(tools), tokenizer).adapt_messages(conversation.messages)
    targets = None if train_on == "all" else tuple(turns)
    text, target_spans, flags = loss_mask.render_with_mask(tokenizer, messages, tools, targets)
    masked = MaskedText(text, target_spans, flags | find_doc_flags(tokenizer, conversation, text, turns))
    weights = message_weights(conversation, turns) if train_on == "per_message" else {}
    if not any(weight < 1 for weight in weights):
        return masked
    spans = [
        (span, weight)
        for weight, group in weights.items()
        for span in loss_mask.render_with_mask(tokenizer, messages, tools, group).spans
    ]
    target_spans, values = zip(*sorted(spans), strict=True)
    return masked._replace(target_spans=[*target_spans], values=values, doc_flags=masked.doc_flags | DocFlags.WEIGHTED)


def render_prompt(tokenizer: Tokenizer, conversation: Conversation) -> MaskedText:
    """Render a conversation up to the end of its last message, without the end of the turn."""
    template = tokenizer.template(conversation.tools)
    messages = detect_features(template, tokenizer).adapt_messages(conversation.messages)
    content = conversation.messages[-1]["content"]
    text = loss_mask.text_before_last_message(tokenizer, messages, conversation.tools, content) + content
    check_encodable(text)
    return MaskedText(text, [], find_doc_flags(tokenizer, conversation, text, [len(messages) - 1]))


def seen_text(tokenizer: Tokenizer, texts: Sequence[MaskedText]) -> str:
    """Texts of the documents of a row, before truncation."""
    return "\n".join(
        text.text if text.document is None else tokenizer.decode(text.document.tokens.tolist()) for text in texts
    )


def target_turns(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """Indices of the target messages. Raise UserError if there is none, or if the flag of a message contradicts."""
    roles = train_on if isinstance(train_on, tuple) else ("assistant",)
    turns = [
        index
        for index, message in enumerate(conversation.messages)
        if message["role"] in roles and index >= conversation.num_prompt_messages
    ]
    if train_on == "all":
        turns = list(range(len(conversation.messages)))
    if train_on == "last":
        turns = turns[-1:]
    if train_on == "per_message":
        turns = flagged_turns(conversation, turns)
    else:
        check_flags(conversation, turns, train_on)
    if not turns:
        expected = "message with a train flag" if train_on == "per_message" else f"{' or '.join(roles)} message"
        raise UserError(f"no target tokens: the conversation has no {expected}")
    return turns


def message_weights(conversation: Conversation, turns: list[int]) -> dict[float, tuple[int, ...]]:
    """Indices of the target messages with each loss weight."""
    weights = {index: conversation.train_flags.get(index, 1.0) for index in turns}
    return {weight: tuple(i for i in turns if weights[i] == weight) for weight in dict.fromkeys(weights.values())}


def flagged_turns(conversation: Conversation, turns: list[int]) -> list[int]:
    """Messages with a weight above 0; without any, the assistant messages without a weight, as in OpenAI's format.

    Flags of prompt messages are ignored.
    """
    flags = conversation.train_flags
    flagged = [index for index, flag in flags.items() if flag and index >= conversation.num_prompt_messages]
    return flagged or [index for index in turns if index not in flags]


def check_flags(conversation: Conversation, turns: list[int], train_on: TrainOn) -> None:
    """Raise UserError if the flag of a message contradicts `train_on`. Flags are never silently ignored."""
    for index, flag in conversation.train_flags.items():
        is_target = index in turns
        is_answer = conversation.messages[index]["role"] == "assistant"
        # A true flag of an answer that `train_on` leaves out is allowed.
        if (bool(flag) != is_target or 0 < flag < 1) and (is_target or not is_answer):
            value = train_on if isinstance(train_on, str) else f"[{', '.join(train_on)}]"
            name = f"train flag is {str(flag).lower()}" if isinstance(flag, bool) else f"weight is {flag:g}"
            raise UserError(
                f"{conversation.column}[{index}]: the {name}, which contradicts "
                f"`train_on: {value}`. Set `train_on: per_message`"
            )


def render_plain_text(text: str, end_token: int, start: int = 0) -> MaskedText:
    """Plain text whose targets are the characters from `start` on and the end token."""
    check_encodable(text)
    return MaskedText(text, [(start, len(text))], DocFlags(0), end_token)


def tokenize_texts(tokenizer: Tokenizer, texts: Sequence[MaskedText]) -> list[Document]:
    """Tokenize texts in one batch."""
    encodings = iter(tokenizer.encode_rendered([masked.text for masked in texts if masked.document is None]))
    return [
        to_document(tokenizer, masked, next(encodings)) if masked.document is None else masked.document
        for masked in texts
    ]


def to_document(tokenizer: Tokenizer, masked: MaskedText, encoding: TokenizerEncoding) -> Document:
    """Document of an encoded text: character spans become a token mask."""
    ids = np.array(encoding.ids, np.int32)
    mask, weights = np.zeros(len(ids), bool), np.zeros(len(ids), np.float32)
    doc_flags = masked.doc_flags
    for index, span in enumerate(masked.target_spans):
        start, end = loss_mask.token_range(encoding, masked.text, span, tokenizer.special_ids)
        mask[end - 1 if masked.is_stepwise else start : end] = True
        if masked.doc_flags & DocFlags.WEIGHTED:
            weights[start:end] = masked.values[index]
    if masked.end_token is not None:
        if not masked.is_stepwise and loss_mask.is_first_token_merged(encoding, masked.target_spans[0], mask):
            doc_flags |= DocFlags.FIRST_TOKEN_MERGED
        ids, mask = add_bos_and_end(ids, mask, bos_ids(tokenizer), masked)
    values = weights[mask] if masked.doc_flags & DocFlags.WEIGHTED else np.array(masked.values, np.float32)
    return Document(ids, mask, len(ids), doc_flags, values)


def add_bos_and_end(
    ids: np.ndarray, mask: np.ndarray, bos: np.ndarray, masked: MaskedText
) -> tuple[np.ndarray, np.ndarray]:
    """Add BOS and end token to ids and mask. The end token is a target; BOS has the mask of the first token."""
    if masked.is_stepwise:
        return np.concatenate((bos, ids)), np.concatenate((np.zeros(len(bos), bool), mask))
    end = [] if len(ids) and ids[-1] == masked.end_token else [masked.end_token]
    ids = np.concatenate((bos, ids, np.array(end, np.int32)))
    mask = np.concatenate((np.full(len(bos), masked.is_continuable), mask, np.ones(len(end), bool)))
    mask[-1] = True
    return ids, mask


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text to continue: with the BOS token that the tokenizer adds, and without an EOS token."""
    return [*bos_ids(tokenizer).tolist(), *tokenizer.encode(text)]


@lru_cache(maxsize=8)
def bos_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Token ids that the tokenizer adds to the start of texts, such as BOS."""
    plain, with_bos = (tokenizer.encode_texts(["a"], special)[0] for special in (False, True))
    count = with_bos.index(plain[0]) if plain[0] in with_bos else 0
    return np.array(with_bos[:count], np.int32)
