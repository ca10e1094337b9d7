"""Single rows as they will be learnt, and what is cut of them: read again from where they come from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from tunekit.data.datasets import DatasetConfig, Encoded
from tunekit.data.doc_flags import DocFlags
from tunekit.data.inspect.token_display import TokenRole
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, Row, RowReader
from tunekit.data.tokenizer import Tokenizer

EVER = 1 << 40  # a length that cuts nothing


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of a document, each with what becomes of it, and what the row says of the document: chosen, a label."""

    tokens: list[int]
    states: list[int]
    told: str = ""

    @property
    def learnt(self) -> int:
        return self.states.count(TokenRole.LEARNT)


@dataclass(frozen=True)
class ExampleView:
    """A row: the documents that it becomes, or why it becomes none."""

    part: str  # the config's key
    where: str
    stretches: tuple[TokenSpan, ...]
    remark: str = ""
    number: int | None = None  # from 1

    @property
    def name(self) -> str:
        return self.part if self.number is None else f"{self.part} row {self.number:,}"

    @property
    def tokens(self) -> int:
        return sum(len(stretch.tokens) for stretch in self.stretches)

    @property
    def learnt(self) -> int:
        return sum(stretch.learnt for stretch in self.stretches)


@dataclass(frozen=True)
class ExampleSampler:
    """Rows of a part of the config; `tokenizer` is the one that the choice has prepared."""

    part: str
    choice: DatasetConfig
    tokenizer: Tokenizer

    @property
    def table(self) -> RowReader:
        return open_dataset(self.choice.source, self.choice.split, self.choice.max_samples, self.choice.streaming)

    def first(self, count: int) -> Iterator[ExampleView]:
        """The first rows."""
        for number, row in enumerate(islice(self.table.rows, count), 1):
            yield self.show(row, number)

    def found(self, wanted: Sequence[str]) -> Iterator[tuple[str, ExampleView]]:
        """Rows that are asked for by number or place, each with how it was asked for."""
        left = list(wanted)
        for number, row in enumerate(self.table.rows if left else (), 1):
            for name in [name for name in left if name == str(number) or is_at(row.where, name)]:
                left.remove(name)
                yield name, self.show(row, number)
            if not left:
                return

    def show(self, row: Row | BadRow, number: int | None) -> ExampleView:
        """What a row becomes."""
        (kept,), (whole,) = (
            one.encode(self.tokenizer, [row]) for one in (self.choice, replace(self.choice, max_length=EVER))
        )
        stretches, remark = compared(kept, whole, self.choice.max_length)
        return ExampleView(self.part, row.where, tuple(stretches), remark, number)


def is_at(where: str, name: str) -> bool:
    """Whether a place is meant by `file:line`, or by the end of it."""
    return where == name or (":" in name and where.endswith(f"/{name}"))


def compared(kept: Encoded, whole: Encoded, length: int) -> tuple[Iterable[TokenSpan], str]:
    """What is learnt from and what is lost of a row, and why."""
    if kept is None or whole is None:
        return (), "a transform leaves it out"
    if isinstance(whole, BadRow):
        return (), f"bad: {whole.reason}"
    if isinstance(kept, BadRow):
        return map(dropped, whole), f"bad: {kept.reason}"
    if not kept:
        return map(dropped, whole), f"dropped: it is longer than {length:,} tokens"
    if len(kept) > len(whole):
        return map(stretch, kept), f"goes on over {len(kept)} rows"
    lost = sum(len(of.tokens) - len(one.tokens) for one, of in zip(kept, whole, strict=True))
    return map(stretch, kept, whole), f"cut: {lost:,} tokens are lost" if lost else ""


def stretch(kept: Document, whole: Document | None = None) -> TokenSpan:
    """A document's tokens, and those of the whole one that are not in it. A first token is never learnt."""
    whole = kept if whole is None else whole
    states = np.full(len(whole.tokens), TokenRole.DROPPED, np.int8)
    states[: len(kept.learnt)] = kept.learnt
    states[0] = TokenRole.CONTEXT
    return TokenSpan(whole.tokens.tolist(), states.tolist(), said(kept))


def dropped(document: Document) -> TokenSpan:
    return TokenSpan(document.tokens.tolist(), [TokenRole.DROPPED] * len(document.tokens), said(document))


def said(document: Document) -> str:
    """What the row says of a document, in words."""
    good, bad, steps = (bool(document.signs & sign) for sign in (DocFlags.GOOD, DocFlags.BAD, DocFlags.STEPS))
    found = ["good" if good else "bad"] if good or bad else []
    if len(document.values):
        kind = "steps" if steps else "margin" if good or bad else "label"
        found.append(" ".join([kind, *(f"{value:g}" for value in document.values)]))
    return ", ".join(found)


def make_example(part: str, documents: TokenizedDataset, index: int) -> ExampleView:
    """A document as it is learnt from; what was cut of it is not there any more."""
    document = documents[index]
    lost = document.whole - len(document.tokens)
    return ExampleView(
        part, documents.where(index), (stretch(document),), f"cut: {lost:,} tokens are lost" if lost else ""
    )
