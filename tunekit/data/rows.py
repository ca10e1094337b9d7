"""The choices of a recipe's `data:`: what a row is and which of its tokens are learnt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from tunekit.data import spans
from tunekit.data.documents import Document
from tunekit.data.messages import column, conversation, string, tool_schemas
from tunekit.data.source import find, parse_split
from tunekit.data.spans import Learn
from tunekit.data.table import Fault, Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Rename, Where
from tunekit.errors import FieldError, UserError

Encoded = list[Document] | Fault | None


@dataclass(frozen=True)
class Rows:
    """Rows of a file, a folder, a bundled data set or a Hub name, as documents of tokens.

    `length` bounds the tokens of a row: longer ones are cut at the end, and no end is put there. `pack` fills rows of
    `length` tokens with whole documents that do not see each other. `limit` takes the first rows only.
    """

    # Keys that say which rows there are and how they are served, but not what one of them becomes.
    SERVING: ClassVar = frozenset(
        {"source", "split", "limit", "pack", "shuffle", "stream", "workers", "bad_rows", "most_bad"}
    )

    source: str
    split: str = "train"
    length: int = 2048
    pack: bool = False
    shuffle: bool = True
    limit: int | None = None
    too_long: Literal["truncate", "drop", "split"] = "truncate"
    bad_rows: Literal["stop", "skip"] = "stop"
    most_bad: float = 0.01
    transforms: tuple[Rename | Where, ...] = ()
    stream: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        if not self.source:
            raise FieldError("source", "name a file, a folder or a data set")
        try:
            parse_split(self.split)
        except ValueError as error:
            raise FieldError("split", str(error)) from None
        if self.length < 2:
            raise FieldError("length", f"must be 2 or more tokens, not {self.length}")
        if self.limit is not None and self.limit < 1:
            raise FieldError("limit", f"must be 1 or more rows, not {self.limit}")
        if not 0 <= self.most_bad <= 1:
            raise FieldError("most_bad", f"is a share of the rows, from 0 to 1, not {self.most_bad}")
        if self.workers is not None and self.workers < 0:
            raise FieldError("workers", f"must be 0 or more processes, not {self.workers}")

    def check(self) -> None:
        """UserError if the source is not there or lacks the split, as far as can be told without reading it."""
        find(self.source, parse_split(self.split).name)

    def code(self) -> dict[str, Any]:
        """The keys that decide what a row becomes, with their values."""
        return {field.name: vars(self)[field.name] for field in fields(self) if field.name not in self.SERVING}

    def encode(self, tokenizer: Tokenizer, rows: Sequence[Row | Fault]) -> list[Encoded]:
        """What each row becomes, in order.

        Documents; none, if it was dropped as too long; a fault; or None, if a transform left it out.
        """
        found: list[Encoded] = [self.entry(tokenizer, row) for row in rows]
        return found

    def cut(self, document: Document) -> Iterator[Document]:
        """At most `length` tokens of a document, with something to learn in them (a first token is never a target)."""
        short = Document(document.tokens[: self.length], document.learnt[: self.length], document.whole)
        if short.learnt[1:].any():
            yield short
            return
        if document.learnt[1:].any():
            first = int(document.learnt[1:].argmax()) + 2
            raise UserError(
                f"nothing to learn in its first {self.length:,} tokens: learnt is only from {first:,} "
                f"of {document.whole:,}; raise `length` or take the row out"
            )
        raise UserError(f"nothing to learn in its {document.whole:,} tokens; take the row out")

    def entry(self, tokenizer: Tokenizer, row: Row | Fault) -> Encoded:
        if isinstance(row, Fault):
            return row
        try:
            values: dict[str, Any] | None = row.fields
            for transform in self.transforms:
                values = values if values is None else transform(values)
            return None if values is None else list(self.cut(self.document(tokenizer, values)))
        except UserError as error:
            return Fault(row.where, str(error))

    def document(self, tokenizer: Tokenizer, fields: dict[str, Any]) -> Document:
        """Tokens of a row, whole."""
        raise NotImplementedError

    def prepare(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer that these rows want; UserError if they cannot be written with this one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conversations(Rows):
    """Rows that a chat template writes. `template` is the path of a Jinja file; None: the checkpoint's own."""

    template: str | None = None

    def check(self) -> None:
        super().check()
        if self.template is not None and not Path(self.template).expanduser().is_file():
            raise UserError(f"{self.template}: no such chat template file")

    def prepare(self, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer = tokenizer if self.template is None else tokenizer.with_template(self.template)
        tokenizer.template()
        return tokenizer

    def document(self, tokenizer: Tokenizer, fields: dict[str, Any]) -> Document:
        text, learnt = self.render(tokenizer, fields)
        (encoding,) = tokenizer.encode_rendered([text])
        ids = np.array(encoding.ids, np.int32)
        mask = np.zeros(len(ids), bool)
        for span in learnt:
            first, behind = spans.tokens_in(encoding, text, span, tokenizer.marks)
            mask[first:behind] = True
        return Document(ids, mask, len(ids))

    def render(self, tokenizer: Tokenizer, fields: dict[str, Any]) -> tuple[str, list[spans.Span]]:
        """Text and learnt characters of a row."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chat(Conversations):
    """Conversations: a column of messages, each with role and content; tool schemas in the column `tools`, if there.

    `learn`: what every assistant turn says, what the last one says, or all there is. A turn's end token is part of it.
    """

    messages: str = "messages"
    learn: Learn = "assistant"

    def render(self, tokenizer: Tokenizer, fields: dict[str, Any]) -> tuple[str, list[spans.Span]]:
        turns = conversation(column(fields, self.messages, "messages"), self.messages)
        tools = tool_schemas(fields["tools"], "tools") if "tools" in fields else None
        return spans.render(tokenizer, turns, tools, self.learn)


@dataclass(frozen=True)
class Instruct(Conversations):
    """An instruction, an input to it and the response to learn, in a column each: one user and one assistant message.

    An empty input is left out. Rows may lack the column `input`, but not one that was named otherwise.
    """

    prompt: str = "instruction"
    input: str | None = "input"
    response: str = "output"
    system: str | None = None

    def render(self, tokenizer: Tokenizer, fields: dict[str, Any]) -> tuple[str, list[spans.Span]]:
        question = string(fields, self.prompt, "prompt")
        if self.input is not None and (self.input != "input" or fields.get("input") is not None):
            more = string(fields, self.input, "input")
            question = f"{question}\n\n{more}" if more else question
        answer = string(fields, self.response, "response")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if self.system is not None:
            turns.insert(0, {"role": "system", "content": self.system})
        return spans.render(tokenizer, turns, None, "assistant")


@dataclass(frozen=True)
class Text(Rows):
    """Plain text, all of it learnt: one longer than `length` goes on in further rows.

    `end` is the token that ends a text; None: the tokenizer's end-of-text token.
    """

    column: str = "text"
    end: str | None = None

    def cut(self, document: Document) -> Iterator[Document]:
        """All of a text: what is longer than `length` goes on in further rows, each from the token it left off at."""
        if document.whole <= self.length:
            yield from super().cut(document)
            return
        for start in range(0, document.whole - 1, self.length - 1):
            tokens = document.tokens[start : start + self.length]
            yield Document(tokens, document.learnt[start : start + self.length], len(tokens))

    def prepare(self, tokenizer: Tokenizer) -> Tokenizer:
        self.end_of_text(tokenizer)
        return tokenizer

    def end_of_text(self, tokenizer: Tokenizer) -> int:
        end = tokenizer.eos if self.end is None else tokenizer.model.token_to_id(self.end)
        if end is None:
            fault = "names no end-of-text token" if self.end is None else f"has no token {self.end!r}"
            raise UserError(f"the tokenizer {fault}; name one of its tokens as `end`")
        return end

    def document(self, tokenizer: Tokenizer, fields: dict[str, Any]) -> Document:
        end = self.end_of_text(tokenizer)
        (ids,) = tokenizer.encode_texts([self.text(fields)], special=True)
        tokens = np.array(ids if ids and ids[-1] == end else [*ids, end], np.int32)
        return Document(tokens, np.ones(len(tokens), bool), len(tokens))

    def text(self, fields: dict[str, Any]) -> str:
        text = string(fields, self.column, "column")
        spans.check_encodable(text)
        return text


def named(row: Row, function, *arguments):
    """Call a function; what it finds wrong is told with the row's file and line."""
    try:
        return function(*arguments)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
