"""The rows of a dataset for which a config is written: their format, number and lengths."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tunekit.data.datasets import DatasetConfig
from tunekit.data.format_detection import (
    EMBEDDING_RULES,
    PREFERENCE_RULES,
    REWARD_RULES,
    RULES,
    RowFormat,
    detect_format,
)
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, require_row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

SAMPLE_SIZE = 1000  # rows whose lengths are measured
EVAL_SPLITS = ("test", "validation", "valid", "dev", "eval")
MIN_ROWS_TO_SPLIT, EVAL_FRACTION = 100, 5  # rows of a dataset without such a split of which some percent are held out
PREFERENCE_TASKS = ("dpo", "orpo", "simpo", "kto")
LABELED = ("stepwise", "labeled")
TASKS = {  # formats that a recipe reads
    "sft": ("chat", "sharegpt", "completion", "instruct", "segments", "text", "pretokenized"),
    "preference": ("preference", "unpaired_preference"),
    "reward": ("preference", *LABELED, "reranking", "reranking_pairs"),
    "embed": ("retrieval", "similarity"),
}
# Rules that are tried first. Triplets train an embedding model, and with `--task reward` a reranker. Questions with
# answers may also be meant for another recipe.
FIRST_RULES = {
    "sft": (),
    "preference": PREFERENCE_RULES,
    "reward": REWARD_RULES,
    "embed": EMBEDDING_RULES,
    None: (
        *RULES[:2],
        *(rule for rule in EMBEDDING_RULES if rule.types.keys().isdisjoint(("question", "answer"))),
        *REWARD_RULES[1:],
    ),
}


@dataclass(frozen=True)
class RowSample:
    """Rows of the training split, and where held-out rows are."""

    source: str
    task: str
    row_format: RowFormat
    count: int
    rows: tuple[Mapping[str, Any], ...]
    split: str
    eval_split: str | None
    labels: frozenset[Any] = frozenset()  # of all rows, for a classifier
    loss: str | None = None  # that `--task` names

    @property
    def data(self) -> dict[str, Any]:
        """Keys of the dataset config that differ from their defaults."""
        columns = {key: name for key, name in self.row_format.columns if key.removesuffix("_column") != name}
        names = {"class_names": self.class_names} if self.class_names else {}
        return {"kind": self.row_format.kind, "source": self.source, **columns, **names}

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, if labels are texts."""
        return sorted(label for label in self.labels if isinstance(label, str))


def sample_rows(source: str, task: str | None) -> RowSample:
    """Read the first rows of a dataset. Raise UserError if it has none, or no format that `task` reads.

    `task` is a recipe or a preference loss; None: the recipe that reads this format.
    """
    loss, task = (task, "preference") if task in PREFERENCE_TASKS else (None, task)
    table = open_dataset(source, "train")
    rows = tuple(require_row(row).fields for row in islice(table.rows, SAMPLE_SIZE))
    try:
        row_format = detect_format(rows[0], FIRST_RULES[task])
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    task = task or next(task for task, kinds in TASKS.items() if row_format.kind in kinds)
    if row_format.kind not in TASKS[task]:
        other = next(task for task, kinds in TASKS.items() if row_format.kind in kinds)
        problem = f"--task {loss or task}: {source} has {row_format.description}"
        raise UserError(f"{problem}. Use --task {other}, or other rows.")
    labels = read_labels(source) if row_format.kind == "labeled" else frozenset[Any]()
    count = table.count or len(rows)
    splits = "train", find_eval_split(source)
    if splits[1] is None and count >= MIN_ROWS_TO_SPLIT:
        splits = f"train[:{100 - EVAL_FRACTION}%]", f"train[{100 - EVAL_FRACTION}%:]"
    return RowSample(source, task, row_format, count, rows, *splits, labels, None if loss == "dpo" else loss)


def read_labels(source: str) -> frozenset[Any]:
    """Labels of all rows, which may be sorted by label. Raise UserError if all rows have the same one."""
    labels = frozenset(require_row(row).fields.get("label") for row in open_dataset(source, "train").rows)
    if len(labels) < 2:
        raise UserError(f"{source}: all rows have label {next(iter(labels))}. A classifier needs rows of two classes.")
    return labels


def find_eval_split(source: str) -> str | None:
    """Split with held-out rows; None if the dataset has none."""
    for split in EVAL_SPLITS:
        try:
            open_dataset(source, split, 1)
        except (UserError, ValueError):
            continue
        return split
    return None


def measure_lengths(data: DatasetConfig, tokenizer: Tokenizer, sample: RowSample) -> list[int]:
    """Tokens of the documents of the sample, ascending. Raise UserError for a row that cannot be encoded."""
    reader = open_dataset(sample.source, "train", len(sample.rows))
    encoded = data.encode_rows(data.prepare_tokenizer(tokenizer), reader.rows)
    for row in encoded:
        if isinstance(row, BadRow):
            raise UserError(f"{row.where}: {row.reason}")
    return sorted(doc.full_length for row in encoded if isinstance(row, list) for doc in row)
