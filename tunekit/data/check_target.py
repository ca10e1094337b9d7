"""Rows as the data checks see them, how they are used, and the findings of a check."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from tunekit.data.document import DocFlags
from tunekit.data.preprocess.tokenized_dataset import ConcatDataset, TokenizedDataset
from tunekit.data.row_stats import RowStats, measure_rows
from tunekit.data.tokenizer import Tokenizer

Severity = Literal["wrong", "doubtful", "note"]
SEVERITIES: tuple[Severity, ...] = ("wrong", "doubtful", "note")
MAX_LISTED = 3  # rows that a finding names
# Words of a message about several rows, and about one row.
SINGULAR = {"are": "is", "ask": "asks", "begin": "begins", "do": "does", "have": "has", "contain": "contains"}
SINGULAR |= {"copies": "a copy"}


@dataclass(frozen=True)
class Finding:
    """One problem: its severity, its kind for programs, a message, and a hint how to fix it."""

    severity: Severity
    kind: str
    config_key: str  # data or eval_data
    message: str
    hint: str
    count: int = 0
    fraction: float = 0.0
    documents: tuple[int, ...] = ()  # the first ones
    row_locations: tuple[str, ...] = ()

    def __str__(self) -> str:
        listed = ", ".join(self.row_locations) + (", .." if self.count > len(self.row_locations) else "")
        rows = f" ({listed})" if self.row_locations else ""
        return f"{self.config_key}: {self.message}{rows}. {self.hint}."


@dataclass(frozen=True)
class RewardTarget:
    """Target of a model that generates no text: pairs, or labels with `num_labels` classes (None: not classes)."""

    kind: Literal["pairs", "labels"]
    num_labels: int | None = None


class LabelRule(NamedTuple):
    """Labels that a loss cannot use: their mask (labels,), and the reason for one of them."""

    is_invalid: Callable[[np.ndarray], np.ndarray]
    reason: Callable[[float], str]


class ColumnReaders(NamedTuple):
    """Columns that rewards and environments read by name, and whether one of them gets all columns."""

    names: frozenset[str] = frozenset()
    get_all: bool = False

    def __or__(self, other: "ColumnReaders") -> "ColumnReaders":
        return ColumnReaders(self.names | other.names, self.get_all or other.get_all)


NO_READERS = ColumnReaders()


@dataclass(frozen=True)
class CheckContext:
    """How the rows are used.

    `max_length` is the maximum tokens of a row, `docs_per_packed_row` (rows,) the number of documents of each packed
    row. `reward_target` is None for language models. `has_num_negatives`: the config sets `num_negatives`, so that rows
    may have more. `label_rule` is that of the loss; None: it can use all labels, or there are none.
    """

    max_length: int
    vocab_size: int | None = None
    docs_per_packed_row: np.ndarray | None = None
    num_steps: int | None = None
    warmup_steps: int | None = None
    reward_target: RewardTarget | None = None
    has_num_negatives: bool = True
    length_key: str = "epochs"  # key that sets `num_steps`
    label_rule: LabelRule | None = None
    column_readers: ColumnReaders = NO_READERS


class CheckTarget:
    """Documents of one config key, with their statistics. A mixture has several `datasets`."""

    def __init__(
        self, config_key: str, datasets: Sequence[TokenizedDataset], tokenizer: Tokenizer, context: CheckContext
    ) -> None:
        self.config_key, self.datasets, self.tokenizer, self.context = config_key, datasets, tokenizer, context
        self.documents = ConcatDataset(datasets)
        self.stats: RowStats = measure_rows(datasets, tokenizer, context.max_length)
        self.lengths = self.documents.lengths
        self.full_lengths = np.concatenate([dataset.full_lengths for dataset in datasets])
        self.doc_flags = np.concatenate([dataset.doc_flags for dataset in datasets])
        self.is_segments = (self.doc_flags & DocFlags.SEGMENTS) > 0
        self.is_truncated = self.lengths < self.full_lengths
        self.hashes = self.stats.token_hash + self.is_truncated  # a truncated document equals no complete one
        # A row may have several documents, not all of which are its start, and a stream may contain a row twice.
        self.row_ids = np.concatenate([row_ids(dataset, i) for i, dataset in enumerate(datasets)], axis=1)
        self.starts_row = np.append(True, (self.row_ids[:, 1:] != self.row_ids[:, :-1]).any(axis=0))
        self.row_indices = np.cumsum(self.starts_row) - 1  # of each document
        self.row_hashes = self.hash_rows()

    def __len__(self) -> int:
        """Number of rows, each of one or more adjacent documents."""
        return int(self.row_indices[-1]) + 1

    def reduce_over_rows(self, ufunc: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Reduce `values` (documents,) over the documents of each row. Each document gets the result of its row."""
        return ufunc.reduceat(values, np.flatnonzero(self.starts_row))[self.row_indices]

    def hash_rows(self) -> np.ndarray:
        """64-bit hash of the row of each document (documents,): of its documents in their order."""
        positions = np.arange(len(self.hashes)) - np.flatnonzero(self.starts_row)[self.row_indices]
        return self.reduce_over_rows(np.add, self.hashes * (2 * positions + 1))  # modulo 2^64; odd factors lose no bit

    def report_rows(
        self, kind: str, mask: np.ndarray, message: str, hint: str, doubtful: float = 0.0, wrong: float = math.inf
    ) -> Iterator[Finding]:
        """Yield a finding if `mask` (documents,) selects any document. `message` is a template of `format_message`.

        The severity is `note`, `doubtful` or `wrong` from these fractions of all documents on.
        """
        documents, fraction = np.flatnonzero(mask), mask.mean()
        if len(documents):
            severity: Severity = "wrong" if fraction >= wrong else "doubtful" if fraction >= doubtful else "note"
            _, first_indices = np.unique(self.row_indices[documents], return_index=True)
            count, first = len(first_indices), tuple(documents[first_indices[:MAX_LISTED]].tolist())
            text = format_message(message, count, len(self)).replace("{limit}", f"{self.context.max_length:,} tokens")
            locations = tuple(map(self.documents.row_location, first))
            yield Finding(severity, kind, self.config_key, text, hint, count, count / len(self), first, locations)

    def report(self, severity: Severity, kind: str, message: str, hint: str) -> Finding:
        """Finding about the dataset, without rows."""
        return Finding(severity, kind, self.config_key, message, hint)


def row_ids(dataset: TokenizedDataset, index: int) -> np.ndarray:
    """Numbers that identify the row of each document (3, documents): dataset, file, and row number."""
    files, numbers = (dataset.flat.columns[name].astype(np.int64) for name in ("file_ids", "row_numbers"))
    return np.stack([np.full(len(files), index), files, numbers])


def format_message(template: str, count: int, total: int) -> str:
    """Insert the number of `{rows}` into a message, and `{have}` or another word of SINGULAR in its form."""
    for plural, singular in SINGULAR.items():
        template = template.replace(f"{{{plural}}}", singular if count == 1 else plural)
    return template.replace("{rows}", format_row_count(count, total))


def format_row_count(count: int, total: int) -> str:
    """Format a number of rows: `3 of 40 rows (7.5%)`."""
    if count == total:
        return "the only row" if total == 1 else f"all {total:,} rows"
    return f"{count:,} of {total:,} rows ({format_percent(count / total)})"


def format_percent(fraction: float) -> str:
    """Format a fraction with two significant digits, never rounded to 0% or 100%."""
    if 0.1 <= fraction < 0.995 or fraction in (0, 1):
        return f"{fraction:.0%}"
    return f"{fraction:.1%}" if fraction > 0.001 else "< 0.1%"
