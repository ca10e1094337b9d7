"""The choices of a recipe's `data:`: what a row is and which of its tokens are learnt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tunekit.data import spans
from tunekit.data.documents import Document, Documents
from tunekit.data.loader import Loader, Order
from tunekit.data.messages import column, conversation, string, tool_schemas
from tunekit.data.source import find, open_source, parse_split
from tunekit.data.spans import Learn
from tunekit.data.table import Row, Table
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

CHUNK = 512  # rows that become tokens together, on all cores


@dataclass(frozen=True)
class Rows:
    """Rows of a file, a folder, a bundled data set or a Hub name, as batches of tokens.

    `length` bounds the tokens of a row: longer ones are cut at the end, and no end is put there. `pack` fills rows of
    `length` tokens with whole documents that do not see each other. `limit` takes the first rows only.
    """

    source: str
    split: str = "train"
    length: int = 2048
    pack: bool = False
    shuffle: bool = True
    limit: int | None = None

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

    def check(self) -> None:
        """UserError if the source is not there or lacks the split, as far as can be told without reading it."""
        find(self.source, parse_split(self.split).name)

    def open(self, tokenizer: Tokenizer, batch: int, micro_batch: int, run) -> Loader:
        """Read and tokenise all rows; UserError names the first that cannot be learnt from. Rank 0 shows a bar."""
        tokenizer = self.prepare(tokenizer)
        table = open_source(self.source, self.split, self.limit)
        bar = tqdm(total=table.count, desc="preparing", unit=" rows", disable=not run.is_main or None, leave=False)
        with bar:
            documents = Documents(self.documents(tokenizer, table, bar))
        order = Order(documents.lengths, run.seed, self.shuffle, self.length if self.pack else None)
        return Loader(documents, order, batch, micro_batch, run, tokenizer.pad)

    def documents(self, tokenizer: Tokenizer, table: Table, bar: tqdm) -> Iterator[Document]:
        while chunk := list(islice(table.rows, CHUNK)):
            for row, document in zip(chunk, self.encode(tokenizer, chunk), strict=True):
                yield from self.cut(row, document)
            bar.update(len(chunk))

    def cut(self, row: Row, document: Document) -> Iterator[Document]:
        """At most `length` tokens of a document, with something to learn in them (a first token is never a target)."""
        short = Document(document.tokens[: self.length], document.learnt[: self.length], document.whole)
        if short.learnt[1:].any():
            yield short
            return
        if document.learnt[1:].any():
            first = int(document.learnt[1:].argmax()) + 2
            raise UserError(
                f"{row.where}: nothing to learn in its first {self.length:,} tokens: learnt is only from {first:,} "
                f"of {document.whole:,}; raise `length` or take the row out"
            )
        raise UserError(f"{row.where}: nothing to learn in its {document.whole:,} tokens; take the row out")

    def prepare(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer that these rows want; UserError if they cannot be written with this one."""
        raise NotImplementedError

    def encode(self, tokenizer: Tokenizer, rows: Sequence[Row]) -> Iterator[Document]:
        """Tokens of rows, each whole."""
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

    def encode(self, tokenizer: Tokenizer, rows: Sequence[Row]) -> Iterator[Document]:
        rendered = [named(row, self.render, tokenizer, row.fields) for row in rows]
        encodings = tokenizer.encode_rendered([text for text, _ in rendered])
        for encoding, (text, learnt) in zip(encodings, rendered, strict=True):
            ids = np.array(encoding.ids, np.int32)
            mask = np.zeros(len(ids), bool)
            for span in learnt:
                first, behind = spans.tokens_in(encoding, text, span, tokenizer.marks)
                mask[first:behind] = True
            yield Document(ids, mask, len(ids))

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

    def cut(self, row: Row, document: Document) -> Iterator[Document]:
        """All of a text: what is longer than `length` goes on in further rows, each from the token it left off at."""
        if document.whole <= self.length:
            yield from super().cut(row, document)
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

    def encode(self, tokenizer: Tokenizer, rows: Sequence[Row]) -> Iterator[Document]:
        end = self.end_of_text(tokenizer)
        texts = [named(row, self.text, row.fields) for row in rows]
        for ids in tokenizer.encode_texts(texts, special=True):
            tokens = np.array(ids if ids and ids[-1] == end else [*ids, end], np.int32)
            yield Document(tokens, np.ones(len(tokens), bool), len(tokens))

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
