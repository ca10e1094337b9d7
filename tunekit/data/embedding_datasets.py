"""Datasets of texts that are embedded or scored as they are: with the special tokens of the tokenizer, without labels
on tokens. sentence-transformers makes the same tokens of the same texts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any, ClassVar, Literal, Self

import numpy as np

from tunekit.data.cell_values import SKIP_HINT, to_number
from tunekit.data.chat_template.messages import get_column
from tunekit.data.column_roles import Columns, column_roles
from tunekit.data.datasets import Fields, UnsplitRowsBase
from tunekit.data.document import DocFlags, Document
from tunekit.data.format_detection import NEGATIVES, POSITIVES, QUERIES
from tunekit.data.preprocess.preprocess import detect_first_row
from tunekit.data.readers.row_reader import json_type
from tunekit.data.tokenize import MaskedText
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

Pooling = Literal["mean", "lasttoken", "cls"]  # tokens whose hidden states are the embedding of a text
NO_FLAGS = DocFlags(0)


@dataclass(frozen=True)
class WholeTextDataset(UnsplitRowsBase):
    """Rows of texts, or pairs of texts, each of which becomes a document of at most `max_length` tokens."""

    def read_texts(self, fields: Fields, role: str) -> list[str]:
        """Texts of the column with a role."""
        return as_texts(get_column(fields, self.columns, role), self.column(role))

    def encode(
        self, tokenizer: Tokenizer, texts: Iterable[str], value: float | None = None, flags: DocFlags = NO_FLAGS
    ) -> MaskedText:
        """Document of a text, or of a pair of texts, truncated before special tokens are added."""
        ids, full_length = tokenizer.encode_with_special(tuple(texts), self.max_length)
        if not ids:
            raise UserError(f"a text has no tokens. {SKIP_HINT}")
        values = np.array([] if value is None else [value], np.float32)
        document = Document(np.array(ids, np.int32), np.ones(len(ids), bool), full_length, flags, values)
        return MaskedText("", [], document=document)

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        """Keep a text that `encode` truncated, even to a single token, unless truncated documents are dropped."""
        if text.document is None:  # a conversation
            return super().limit_length(text, document)
        is_truncated = document.full_length > len(document.tokens)
        return [] if is_truncated and self.excess_length_strategy == "drop" else [document]


@dataclass(frozen=True)
class RetrievalDataset(WholeTextDataset):
    """A query, a document that answers it, and any number of hard negatives: documents that do not.

    Negatives are a text, a list of texts, or columns with numbers (`negative_1`, `negative_2`). In-batch negatives
    need no column: they are the documents of the other rows of a step.
    """

    kind: ClassVar[str] = "retrieval"
    is_default: ClassVar[bool] = True
    nullable_roles: ClassVar[frozenset[str]] = frozenset({"query", "positive", "negative"})
    # Columns of the `query` (null: the first of query, anchor, question), the document (`positive`; null: the first of
    # positive, pos, answer), and the hard negatives (`negative`; null: the first of negative, neg)
    columns: Columns = column_roles(query=None, positive=None, negative=None)
    # Hard negatives per row, of which each row must have at least as many; null: as many as the first row has
    num_negatives: int | None = None
    query_prompt: str = ""  # Text before each query; saved with the model, as the prompt of `encode_query`
    document_prompt: str = ""  # Text before each document; saved with the model, for `encode_document`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_negatives is not None and self.num_negatives < 0:
            raise FieldError("num_negatives", f"must be >= 0, got {self.num_negatives}")

    @property
    def docs_per_row(self) -> int:
        return 2 + (self.num_negatives or 0)

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts by their name in sentence-transformers."""
        return {"query": self.query_prompt, "document": self.document_prompt}

    @property
    def is_resolved(self) -> bool:
        """Whether the columns of queries and documents and the number of negatives are known."""
        return None not in (self.columns["query"], self.columns["positive"], self.num_negatives)

    def resolve(self) -> Self:
        """Config with the columns and the number of negatives of the first row."""
        return self if self.is_resolved else detect_first_row(self, self.detect)

    def detect(self, fields: Fields) -> Self:
        """Config of the format of a row."""
        query = self.columns["query"] or first_column(fields, QUERIES)
        positive = self.columns["positive"] or first_column(fields, POSITIVES)
        config = replace(self, columns={**self.columns, "query": query, "positive": positive})
        config.texts(fields, 0)
        if self.num_negatives is not None:
            return config
        negative = self.columns["negative"]
        if negative is not None and f"{negative}_1" not in fields:
            get_column(fields, self.columns, "negative")
        return replace(config, num_negatives=len(config.negatives(fields)))

    def describe(self, fields: Fields) -> str:
        negatives = f" and {self.num_negatives} hard negative{'s' * (self.num_negatives != 1)}" * bool(
            self.num_negatives
        )
        return f"queries with documents{negatives} (columns {self.columns['query']!r}, {self.columns['positive']!r})"

    def texts(self, fields: Fields, num_negatives: int) -> list[str]:
        """Query, positive, and the first negatives of a row."""
        query, positive = (self.read_texts(fields, role)[:1] for role in ("query", "positive"))
        negatives = self.negatives(fields) if num_negatives else []
        if len(negatives) < num_negatives:
            problem = f"the row has {len(negatives)} hard negatives, but {num_negatives} are required (by default those"
            raise UserError(f"{self.negatives_name(fields)}: {problem} of the first row). Set a lower `num_negatives`")
        return [*query, *positive, *negatives[:num_negatives]]

    def negatives_name(self, fields: Fields) -> str:
        """Column of the hard negatives of a row, without its number."""
        return self.columns["negative"] or first_column(fields, NEGATIVES)

    def unused_flag(self, fields: Fields) -> DocFlags:
        """Flag of a row with more hard negatives than are used."""
        counts = (len(value) if isinstance(value, list) else 1 for _, value in self.negative_columns(fields))
        return DocFlags.NEGATIVES_UNUSED if sum(counts) > (self.num_negatives or 0) else NO_FLAGS

    def negatives(self, fields: Fields) -> list[str]:
        """All hard negatives of a row."""
        columns = self.negative_columns(fields)
        return [text for column, value in columns for text in as_texts(value, column, required=False)]

    def negative_columns(self, fields: Fields) -> list[tuple[str, Any]]:
        """Columns of a row with hard negatives, and their values."""
        name = self.negatives_name(fields)
        numbered = takewhile(fields.__contains__, (f"{name}_{i}" for i in count(1)))
        return [(column, fields[column]) for column in (name, *numbered) if fields.get(column) is not None]

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        config = self if self.is_resolved else self.detect(fields)
        query, *documents = config.texts(fields, config.num_negatives or 0)
        texts = [self.query_prompt + query, *(self.document_prompt + document for document in documents)]
        flag = config.unused_flag(fields)
        return [self.encode(tokenizer, [text], flags=flag) for text in texts]


@dataclass(frozen=True)
class SimilarityDataset(WholeTextDataset):
    """Two texts and how similar they are."""

    kind: ClassVar[str] = "similarity"
    # Columns of the two texts, and of their similarity (`score`): a number, true or false
    columns: Columns = column_roles(sentence1="sentence1", sentence2="sentence2", score="score")
    prompt: str = ""  # Text before each of them; saved with the model as the prompt `similarity`

    @property
    def docs_per_row(self) -> int:
        return 2

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts by their name in sentence-transformers."""
        return {"similarity": self.prompt} if self.prompt else {}

    def describe(self, fields: Fields) -> str:
        return f"pairs of texts with a similarity (column {self.columns['score']!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        score = to_number(get_column(fields, self.columns, "score"), self.column("score"))
        texts = [self.read_texts(fields, role)[0] for role in ("sentence1", "sentence2")]
        return [self.encode(tokenizer, [self.prompt + text], score) for text in texts]


@dataclass(frozen=True)
class RerankingDataset(WholeTextDataset):
    """A query, a document, and how relevant the document is. Both texts are scored together, as a pair of texts."""

    kind: ClassVar[str] = "reranking"
    # Columns of the `query`, the `document`, and its relevance (`label`): a number from 0 to 1, true or false
    columns: Columns = column_roles(query="query", document="document", label="label")
    query_prompt: str = ""  # Text before each query
    document_prompt: str = ""  # Text between query and document, such as "\n"

    def describe(self, fields: Fields) -> str:
        return f"queries and documents with a label (column {self.columns['label']!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        label = to_number(get_column(fields, self.columns, "label"), self.column("label"))
        query, document = (self.read_texts(fields, role)[0] for role in ("query", "document"))
        return [self.encode(tokenizer, (self.query_prompt + query, self.document_prompt + document), label)]


@dataclass(frozen=True)
class RerankingPairsDataset(RetrievalDataset):
    """A query, a document that answers it, and one that does not. Each is scored with the query, as a pair of texts."""

    kind: ClassVar[str] = "reranking_pairs"
    num_negatives: int | None = 1  # Hard negatives per row: 1
    query_prompt: str = ""  # Text before each query
    document_prompt: str = ""  # Text between query and document, such as "\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_negatives != 1:
            raise FieldError("num_negatives", f"must be 1, got {self.num_negatives}: a pair has two documents")

    @property
    def docs_per_row(self) -> int:
        return 2

    def describe(self, fields: Fields) -> str:
        return "queries, each with a relevant and an irrelevant document"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        config = self if self.is_resolved else self.detect(fields)
        query, *documents = config.texts(fields, 1)
        flags = (flag | config.unused_flag(fields) for flag in (DocFlags.DESIRABLE, DocFlags.UNDESIRABLE))
        return [
            self.encode(tokenizer, (self.query_prompt + query, self.document_prompt + document), flags=flag)
            for document, flag in zip(documents, flags, strict=True)
        ]


def first_column(fields: Fields, names: Sequence[str]) -> str:
    """First of these columns that a row has, also with a number; the first name if it has none."""
    return next((name for name in names if name in fields or f"{name}_1" in fields), names[0])


def as_texts(value: Any, name: str, required: bool = True) -> list[str]:
    """Texts of a column that has one text or a list of them."""
    texts = value if isinstance(value, list) else [value]
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong or (required and not texts):
        received = json_type(wrong[0]) if wrong else "an empty list"
        raise UserError(f"{name}: must be a text or a list of texts, got {received}. {SKIP_HINT}")
    return texts
