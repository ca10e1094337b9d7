"""The rows of a dataset for which a config is written: their format, number and lengths."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from tunekit.data.chat_template.messages import parse_json_cell
from tunekit.data.datasets import DatasetConfig
from tunekit.data.format_detection import (
    EMBEDDING_RULES,
    PREFERENCE_RULES,
    REWARD_RULES,
    RULES,
    SPEAKER_KEYS,
    RowFormat,
    detect_format,
    is_sharegpt,
)
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, Row, UnreadableCell
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
Fields = Mapping[str, Any]
# Usual names of columns, for rows of unknown formats.
PROMPTS = ("prompt", "question", "instruction", "query", "input", "user", "human")
ANSWERS = ("answer", "output", "response", "completion", "target", "assistant", "reply")


class Lengths(NamedTuple):
    """Tokens of the documents of a sample, ascending, and the rows that cannot be used."""

    tokens: list[int]
    bad_rows: list[BadRow]


@dataclass(frozen=True)
class RowSample:
    """Rows of the training split, and where held-out rows are."""

    source: str
    task: str
    row_format: RowFormat  # of most rows
    is_mixed: bool  # whether the recipe reads other rows as well, by their own formats
    is_guess: bool  # whether the columns have unknown names
    count: int
    num_read: int  # rows at the start of the source
    rows: tuple[Fields, ...]  # those with a known format
    split: str
    eval_split: str | None
    labels: frozenset[Any] = frozenset()  # of all rows, for a classifier
    loss: str | None = None  # that `--task` names

    @property
    def data(self) -> dict[str, Any]:
        """Keys of the dataset config that differ from their defaults."""
        if self.is_mixed:
            return {"source": self.source}
        columns = {role: name for role, name in self.row_format.columns if role != name}
        roles = {"columns": columns} if columns else {}
        names = {"class_names": self.class_names} if self.class_names else {}
        return {"kind": self.row_format.kind, "source": self.source, **roles, **names}

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, if labels are texts."""
        return sorted(label for label in self.labels if isinstance(label, str))


def sample_rows(source: str, task: str | None) -> RowSample:
    """Read the first rows of a dataset. Raise UserError if no row has a format that `task` reads.

    `task` is a recipe or a preference loss; None: the recipe that reads the format of most rows.
    """
    loss, task = (task, "preference") if task in PREFERENCE_TASKS else (None, task)
    table = open_dataset(source, "train")
    items = [*islice(table.rows, SAMPLE_SIZE)]
    formats, is_guess = detect_formats(source, items, task)
    row_format = Counter(row_format for _, row_format in formats).most_common(1)[0][0]
    task = task or task_of(row_format)
    if row_format.kind not in TASKS[task]:
        problem = f"--task {loss or task}: {source} has {row_format.description}"
        raise UserError(f"{problem}. Use --task {task_of(row_format)}, or other rows.")
    readable = [(fields, item) for fields, item in formats if item.kind in TASKS[task]]
    is_mixed = task == "sft" and any(item != row_format for _, item in readable)
    rows = tuple(fields for fields, item in readable if is_mixed or item == row_format)
    labels = read_labels(source) if row_format.kind == "labeled" else frozenset[Any]()
    count = table.count or len(items)
    splits = "train", find_eval_split(source)
    if splits[1] is None and count >= MIN_ROWS_TO_SPLIT:
        splits = f"train[:{100 - EVAL_FRACTION}%]", f"train[{100 - EVAL_FRACTION}%:]"
    sizes = (count, len(items))
    loss = None if loss == "dpo" else loss
    return RowSample(source, task, row_format, is_mixed, is_guess, *sizes, rows, *splits, labels, loss)


def detect_formats(
    source: str, items: Sequence[Row | BadRow], task: str | None
) -> tuple[list[tuple[Fields, RowFormat]], bool]:
    """The rows of known formats; without any, all with a guess for recipe sft (True). Raise UserError without both."""
    rows = [item.fields for item in items if isinstance(item, Row)]
    formats: list[tuple[Fields, RowFormat]] = []
    errors = [f"{item.where}: {item.reason}" for item in items if isinstance(item, BadRow)]
    for fields in rows:
        try:
            formats.append((fields, detect_format(fields, FIRST_RULES[task])))
        except UserError as error:
            errors.insert(0, f"{source}: {error}")
    guess = guess_format(rows) if not formats and task in ("sft", None) else None
    formats = formats or [(fields, guess) for fields in rows if guess is not None]
    if not formats:
        raise UserError(errors[0])
    return formats, guess is not None


def task_of(row_format: RowFormat) -> str:
    """Recipe that reads a format."""
    return next(task for task, kinds in TASKS.items() if row_format.kind in kinds)


def read_labels(source: str) -> frozenset[Any]:
    """Labels of all rows, which may be sorted by label. Raise UserError if all rows have the same one."""
    rows = (row for row in open_dataset(source, "train").rows if isinstance(row, Row))
    values = (row.fields.get("label") for row in rows)
    labels = frozenset(value for value in values if not isinstance(value, UnreadableCell))
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


def measure_lengths(data: DatasetConfig, tokenizer: Tokenizer, sample: RowSample) -> Lengths:
    """Tokens of the documents of the sample, and its rows that cannot be encoded."""
    reader = open_dataset(sample.source, "train", sample.num_read)
    encoded = data.encode_rows(data.prepare_tokenizer(tokenizer), reader.rows)
    bad_rows = [row for row in encoded if isinstance(row, BadRow)]
    tokens = sorted(doc.full_length for row in encoded if isinstance(row, list) for doc in row)
    return Lengths(tokens, bad_rows)


def guess_format(rows: Sequence[Fields]) -> RowFormat | None:
    """Format of most rows: messages, a prompt and its answer, or plain text; None if there are no texts."""
    names = [*dict.fromkeys(name for fields in rows for name in fields)]
    values = {name: [fields[name] for fields in rows if fields.get(name) is not None] for name in names}
    chats = (name for name, column in values.items() if 2 * sum(map(is_conversation, column)) > len(rows))
    if (chat := next(chats, None)) is not None:
        is_other = is_sharegpt(parse_json_cell(next(filter(is_conversation, values[chat])), SPEAKER_KEYS))
        kind, role = ("sharegpt", "conversations") if is_other else ("chat", "messages")
        return RowFormat(kind, ((role, chat),), f"messages in column {chat!r}")
    texts = {name: [value for value in column if isinstance(value, str)] for name, column in values.items()}
    texts = {name: column for name, column in texts.items() if 2 * len(column) > len(rows)}
    prompt, answer = find_prompt_and_answer(texts)
    if prompt is None and answer is not None:
        return RowFormat("text", (("text", answer),), f"texts in column {answer!r}")
    if prompt is None or answer is None:
        return None
    columns = (("prompt", prompt), ("completion", answer))
    if "input" in names:
        columns = (*columns, ("input", None))
    unused = ", ".join(repr(name) for name in names if name not in (prompt, answer))
    suffix = f"; {unused} {'are' if ',' in unused else 'is'} not used" if unused else ""
    return RowFormat("instruct", columns, f"prompts in column {prompt!r}, answers in column {answer!r}{suffix}")


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, or a JSON string of one."""
    items = parse_json_cell(value, SPEAKER_KEYS)
    is_list = isinstance(items, list) and bool(items)
    return is_list and all(isinstance(item, dict) and item.keys() & SPEAKER_KEYS for item in items)


def find_prompt_and_answer(texts: Mapping[str, Sequence[str]]) -> tuple[str | None, str | None]:
    """Columns of the prompt and of the answer: those with usual names, or else the longest texts, in their order.

    Without a prompt, the answer is plain text.
    """
    prompt = next((name for name in PROMPTS if name in texts), None)
    answer = next((name for name in ANSWERS if name in texts), None)
    others = sorted(
        (name for name in texts if name not in (prompt, answer)), key=lambda name: -mean_length(texts[name])
    )
    if prompt is None and answer is None and len(others) > 1:
        first, second = (name for name in texts if name in others[:2])
        return first, second
    if answer is None:
        return prompt, next(iter(others), None)
    return prompt or next(iter(others), None), answer


def mean_length(column: Sequence[str]) -> float:
    return sum(map(len, column)) / max(1, len(column))
