"""Rows as they are trained on, with the tokens that truncation removes. Rows are read again from their source."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from tunekit.data.datasets import DatasetConfig, EncodedRow
from tunekit.data.document import DocFlags, Document
from tunekit.data.inspect.token_display import TokenRole
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.tokenizer import Tokenizer

UNLIMITED_LENGTH = 1 << 40  # a max_length that truncates nothing


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of a document, the TokenRole of each, and its labels (chosen or rejected, margin, label, steps)."""

    tokens: list[int]
    roles: list[int]
    annotation: str = ""

    @property
    def num_target_tokens(self) -> int:
        return self.roles.count(TokenRole.TARGET)


@dataclass(frozen=True)
class ExampleView:
    """A row and its documents. `remark` is the reason if some tokens, or all, are not used."""

    config_key: str  # `data` or `eval_data`
    location: str
    spans: tuple[TokenSpan, ...]
    remark: str = ""
    number: int | None = None  # from 1
    has_targets: bool = True  # False: a prompt

    @property
    def name(self) -> str:
        return self.config_key if self.number is None else f"{self.config_key} row {self.number:,}"

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    @property
    def num_target_tokens(self) -> int:
        return sum(span.num_target_tokens for span in self.spans)

    @property
    def token_counts(self) -> str:
        """Number of tokens, and of target tokens unless the row is a prompt."""
        targets = f", {self.num_target_tokens:,} target tokens" if self.has_targets else ""
        return f"{self.num_tokens:,} tokens{targets}"


@dataclass(frozen=True)
class ExampleSampler:
    """Reads examples of a dataset. `tokenizer` is the result of its `prepare_tokenizer`."""

    config_key: str
    dataset: DatasetConfig
    tokenizer: Tokenizer

    def first_examples(self, count: int) -> Iterator[ExampleView]:
        """Yield the first rows."""
        for number, row in enumerate(islice(self.dataset.open_rows().rows, count), 1):
            yield self.to_example(row, number)

    def find_examples(self, names: Sequence[str]) -> Iterator[tuple[str, ExampleView]]:
        """Yield the rows with these names, row numbers or locations, each with its name."""
        remaining = list(names)
        for number, row in enumerate(self.dataset.open_rows().rows if remaining else (), 1):
            for name in [name for name in remaining if name == str(number) or is_location(row.where, name)]:
                remaining.remove(name)
                yield name, self.to_example(row, number)
            if not remaining:
                return

    def to_example(self, row: Row | BadRow, number: int) -> ExampleView:
        """Encode a row, with and without truncation."""
        (encoded,) = self.dataset.encode_rows(self.tokenizer, [row])
        (full,) = replace(self.dataset, max_length=UNLIMITED_LENGTH).encode_rows(self.tokenizer, [row])
        spans, remark = compare_spans(encoded, full, self.dataset)
        return ExampleView(self.config_key, row.where, tuple(spans), remark, number, self.dataset.has_targets)


def is_location(where: str, name: str) -> bool:
    """Whether `name` is the location `file:line`, or the end of its path."""
    return where == name or (":" in name and where.endswith(f"/{name}"))


def compare_spans(encoded: EncodedRow, full: EncodedRow, dataset: DatasetConfig) -> tuple[Iterable[TokenSpan], str]:
    """Return the spans of a row, and a remark if tokens are lost or the row is not used."""
    if encoded is None or full is None:
        return (), "removed by a transform"
    if isinstance(full, BadRow):
        return (), f"bad: {full.reason}"
    if isinstance(encoded, BadRow):
        return map(to_dropped_span, full), f"bad: {encoded.reason}"
    if not encoded:
        return map(to_dropped_span, full), f"dropped: longer than {dataset.max_length:,} tokens"
    to_span = partial(make_span, has_targets=dataset.has_targets)
    if len(encoded) > len(full):
        return map(to_span, encoded), f"split into {len(encoded)} rows"
    pairs = zip(encoded, full, strict=True)
    num_lost = sum(len(original.tokens) - len(document.tokens) for document, original in pairs)
    return map(to_span, encoded, full), f"truncated: {num_lost:,} tokens lost" if num_lost else ""


def make_span(document: Document, full: Document | None = None, has_targets: bool = True) -> TokenSpan:
    """Return the tokens of a document, followed by those that were truncated. The first token is never a target."""
    full = document if full is None else full
    states = np.full(len(full.tokens), TokenRole.DROPPED, np.int8)
    states[: len(document.loss_mask)] = document.loss_mask & has_targets
    states[0] = TokenRole.CONTEXT
    return TokenSpan(full.tokens.tolist(), states.tolist(), describe_document(document))


def to_dropped_span(document: Document) -> TokenSpan:
    return TokenSpan(document.tokens.tolist(), [TokenRole.DROPPED] * len(document.tokens), describe_document(document))


def describe_document(document: Document) -> str:
    """Format the labels of a document."""
    flags = (DocFlags.DESIRABLE, DocFlags.UNDESIRABLE, DocFlags.STEPWISE)
    is_chosen, is_rejected, has_step_labels = (bool(document.doc_flags & flag) for flag in flags)
    descriptions = ["good" if is_chosen else "bad"] if is_chosen or is_rejected else []
    if len(document.values):
        kind = "steps" if has_step_labels else "margin" if is_chosen or is_rejected else "label"
        descriptions.append(" ".join([kind, *(f"{value:g}" for value in document.values)]))
    return ", ".join(descriptions)


def make_example(config_key: str, documents: TokenizedDataset, index: int, has_targets: bool) -> ExampleView:
    """Return a document as it is trained on, without the tokens that were truncated."""
    document = documents[index]
    num_lost = document.full_length - len(document.tokens)
    remark = f"truncated: {num_lost:,} tokens lost" if num_lost else ""
    span = make_span(document, has_targets=has_targets)
    return ExampleView(config_key, documents.row_location(index), (span,), remark, has_targets=has_targets)
