"""From what a row is to text with learnt characters, and from there to documents of tokens."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from tunekit.data.chat_template import loss_mask
from tunekit.data.chat_template.messages import Conversation
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.chat_template.template_warnings import find_doc_flags
from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

Role = Literal["system", "developer", "user", "assistant", "tool"]
TrainOn = Literal["assistant", "last", "all", "per_message"] | tuple[Role, ...]


class MaskedText(NamedTuple):
    """Text and its learnt character spans.

    `end`: the token behind it, if it is no template's text; then the tokenizer's own beginning stands before it too.
    `values`: what is said of it in numbers; of steps that are judged, for each span one, and no token stands behind.
    """

    text: str
    target_spans: list[loss_mask.Span]
    doc_flags: DocFlags = DocFlags(0)
    end_token: int | None = None
    values: tuple[float, ...] = ()

    @property
    def is_stepwise(self) -> bool:
        """Whether each span is a step with a value of its own."""
        return bool(self.doc_flags & DocFlags.STEPWISE)

    @property
    def is_continuable(self) -> bool:
        """Whether it is text that is learnt from its first character on, and may go on in further rows."""
        return self.end_token is not None and self.target_spans[0][0] == 0


def render_conversation(tokenizer: Tokenizer, talk: Conversation, learn: TrainOn) -> MaskedText:
    """A conversation as the template writes it."""
    turns = target_turns(talk, learn)
    messages = detect_features(tokenizer.template(talk.tools), tokenizer).adapt_messages(talk.messages)
    text, learnt, noticed = loss_mask.render_with_mask(
        tokenizer, messages, talk.tools, "all" if learn == "all" else turns
    )
    return MaskedText(text, learnt, noticed | find_doc_flags(tokenizer, talk, text, turns))


def render_prompt(tokenizer: Tokenizer, talk: Conversation) -> MaskedText:
    """A conversation as the template writes it, up to where its last message is said: the turn does not end."""
    messages = detect_features(tokenizer.template(talk.tools), tokenizer).adapt_messages(talk.messages)
    said = talk.messages[-1]["content"]
    text = loss_mask.text_before_last_message(tokenizer, messages, talk.tools, said) + said
    loss_mask.check_encodable(text)
    return MaskedText(text, [], find_doc_flags(tokenizer, talk, text, [len(messages) - 1]))


def target_turns(talk: Conversation, learn: TrainOn) -> list[int]:
    """The messages to learn. UserError if there is none, or if a message's own flag says otherwise."""
    roles = learn if isinstance(learn, tuple) else ("assistant",)
    turns = [
        index
        for index, message in enumerate(talk.messages)
        if message["role"] in roles and index >= talk.num_prompt_messages
    ]
    if learn == "all":
        turns = list(range(len(talk.messages)))
    if learn == "last":
        turns = turns[-1:]
    if learn == "per_message":
        turns = flagged_turns(talk, turns)
    elif talk.train_flags is not None:
        check_flags(talk, turns, learn)
    if not turns:
        which = "message that is marked" if learn == "per_message" else f"{' or '.join(roles)} message"
        raise UserError(f"nothing to learn: the conversation has no {which}")
    return turns


def flagged_turns(talk: Conversation, turns: list[int]) -> list[int]:
    """Messages marked true; where none is, all of the assistant but those marked false, as OpenAI counts weights.

    Marks in a prompt say nothing: it is not learnt.
    """
    flags = talk.train_flags or [None] * len(talk.messages)
    wanted = [index for index, flag in enumerate(flags) if flag and index >= talk.num_prompt_messages]
    return wanted or [index for index in turns if flags[index] is not False]


def check_flags(talk: Conversation, turns: list[int], learn: TrainOn) -> None:
    """Flags are not passed over: where they say otherwise, somebody has to decide."""
    for index, flag in enumerate(talk.train_flags or ()):
        learnt, answer = index in turns, talk.messages[index]["role"] == "assistant"
        if flag not in (None, learnt) and (
            learnt or not answer
        ):  # answers may all be marked where `train_on` takes some
            says = "is marked to be learnt" if flag else "is marked not to be learnt"
            told = learn if isinstance(learn, str) else f"[{', '.join(learn)}]"
            raise UserError(f"{talk.column}[{index}]: {says}, against `train_on: {told}`; set `train_on: per_message`")


def render_plain_text(text: str, end: int, start: int = 0) -> MaskedText:
    """Plain text between the tokenizer's own beginning and an end; learnt from the character `start` on."""
    loss_mask.check_encodable(text)
    return MaskedText(text, [(start, len(text))], DocFlags(0), end)


def tokenize_texts(tokenizer: Tokenizer, texts: Sequence[MaskedText]) -> list[Document]:
    """Texts as tokens, all of them together."""
    encodings = tokenizer.encode_rendered([written.text for written in texts])
    return [to_document(tokenizer, *pair) for pair in zip(texts, encodings, strict=True)]


def to_document(tokenizer: Tokenizer, written: MaskedText, encoding) -> Document:
    ids = np.array(encoding.ids, np.int32)
    learnt = np.zeros(len(ids), bool)
    for span in written.target_spans:
        first, behind = loss_mask.token_range(encoding, written.text, span, tokenizer.special_ids)
        learnt[behind - 1 if written.is_stepwise else first : behind] = True
    if written.end_token is not None:
        ids, learnt = add_bos_and_end(ids, learnt, bos_ids(tokenizer), written)
    return Document(ids, learnt, len(ids), written.doc_flags, np.array(written.values, np.float32))


def add_bos_and_end(
    ids: np.ndarray, learnt: np.ndarray, head: np.ndarray, written: MaskedText
) -> tuple[np.ndarray, np.ndarray]:
    """A text between its beginning and its end. The end is learnt; the beginning counts as learnt if all else is."""
    if written.is_stepwise:
        return np.concatenate((head, ids)), np.concatenate((np.zeros(len(head), bool), learnt))
    tail = [] if len(ids) and ids[-1] == written.end_token else [written.end_token]
    ids = np.concatenate((head, ids, np.array(tail, np.int32)))
    learnt = np.concatenate((np.full(len(head), written.is_continuable), learnt, np.ones(len(tail), bool)))
    learnt[-1] = True
    return ids, learnt


@lru_cache(maxsize=8)
def bos_ids(tokenizer: Tokenizer) -> np.ndarray:
    """What the tokenizer puts before every text: the token that begins one, for many."""
    bare, whole = (tokenizer.encode_texts(["a"], special)[0] for special in (False, True))
    return np.array(whole[: whole.index(bare[0])], np.int32)
