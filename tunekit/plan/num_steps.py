"""Number of steps of a config, counted from local data files. If rows are split or packed, from a sample of them."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from tunekit import build
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.config.secrets import iter_strings
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.packing import pack_rows
from tunekit.data.dataloader.sampler import StepIndex
from tunekit.data.datasets import DatasetConfig, TextDataset
from tunekit.data.document import Document
from tunekit.data.preprocess.preprocess import probe_rows
from tunekit.data.readers.open_dataset import find_data_files
from tunekit.data.readers.row_reader import Row, RowReader
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.plan.rollout_cache import SamplesAnswers
from tunekit.plan.workload import TrainingOptions

MAX_FILE_BYTES = 2**31  # larger files take too long to count
NUM_SAMPLED_ROWS = 200  # rows from which lengths are estimated
MAX_TOKENIZED_CHARS = 100_000  # characters of these rows that are tokenized, in about 0.1 s
BYTES_PER_TOKEN = 4  # typical of text that models are trained on
MAX_PACKED_ROWS = 5000  # rows whose packing is planned; more are extrapolated


@dataclass(frozen=True)
class StepCount:
    """Number of steps of a run."""

    steps: int
    rows: int | None = None  # of an epoch, before they are packed
    epochs: int = 1
    exact: bool = True  # False if rows are split, dropped or packed, and not all of them were tokenized
    packed: bool = False
    tokens: int | None = None  # of all steps; None: unknown, at most `max_length` for each row


@dataclass(frozen=True)
class LengthSample:
    """Rows of training that some rows of a dataset become."""

    lengths: np.ndarray  # tokens of each
    num_rows: int  # rows of the dataset
    is_complete: bool  # whether all rows of the dataset were tokenized

    def count_rows(self, num_rows: int) -> int:
        """Rows of training that `num_rows` rows of the dataset become."""
        return round(num_rows * len(self.lengths) / max(1, self.num_rows))

    def repeat(self, count: float) -> np.ndarray:
        """Lengths of about `count` rows."""
        return np.resize(self.lengths, max(1, round(count)))


def count_steps(cfg: TrainingOptions, source: HFCheckpoint | None = None) -> StepCount | None:
    """Return `max_steps`, or count the rows. None if the rows are not local files or are streamed.

    Without the tokenizer of `source`, tokens are estimated from the length of texts.
    """
    if cfg.max_steps is not None:
        return StepCount(cfg.max_steps)
    try:
        mix = MixtureBase.from_config(cfg.data).resolve()
        tables = [table for config in mix.dataset_configs if (table := open_rows(config)) is not None]
        counts = [table.count for table in tables if table.count is not None]
        if len(counts) < len(mix.dataset_configs):
            return None
        pairs = list(zip(mix.dataset_configs, tables, strict=True))
        rows = sum(mix.rows_per_epoch(counts))
        if isinstance(cfg, SamplesAnswers):  # rows are prompts: packing is of answers, and all steps are complete
            steps = cfg.epochs * cfg.steps_per_prompt * (rows // cfg.num_prompts)
            return StepCount(steps, rows, cfg.epochs)
        if not mix.packing and not any(can_change_count(*pair) for pair in pairs):
            return StepCount(StepIndex(lambda _: rows, cfg.global_batch_size).num_steps(cfg.epochs), rows, cfg.epochs)
        tokenizer = open_tokenizer(source)
        return estimate_steps(cfg, mix, [sample_lengths(*pair, tokenizer) for pair in pairs], counts)
    except (UserError, OSError):  # data preparation reports these errors
        return None


def open_rows(rows: DatasetConfig) -> RowReader | None:
    """Open the rows if they are in local files that are small enough to count."""
    files = find_data_files(rows.source, rows.split)
    if rows.streaming or not files or sum(Path(file).stat().st_size for file in files) > MAX_FILE_BYTES:
        return None
    return rows.open_rows()


def open_tokenizer(source: HFCheckpoint | None) -> Tokenizer | None:
    """The tokenizer of a checkpoint if its files are on this machine."""
    if source is None or not source.has_tokenizer:
        return None
    return build.open_tokenizer(source)


def can_change_count(config: DatasetConfig, table: RowReader) -> bool:
    """Whether a row may become several rows or none. Prompts are rarely dropped."""
    has_filters = bool(config.transforms) or config.on_bad_row == "skip"
    return config.has_targets and (has_filters or get_excess_length_strategy(config, table)[0] != "truncate")


def get_excess_length_strategy(config: DatasetConfig, table: RowReader) -> tuple[str, int]:
    """Treatment of long rows, and the number of tokens by which the windows of a split row overlap."""
    strategy = config.excess_length_strategy
    if isinstance(config, AutoDataset) and isinstance(probe_rows(config, table, config.detect)[0], TextDataset):
        return "split" if strategy == "truncate" else strategy, 1
    return strategy, 1 if isinstance(config, TextDataset) else config.max_length // 2


def estimate_steps(cfg: TrainingOptions, mix: MixtureBase, samples: list[LengthSample], counts: list[int]) -> StepCount:
    """Number of steps for datasets of `counts` rows. It is exact if all of them were tokenized."""
    num_rows = [sample.count_rows(count) for sample, count in zip(samples, counts, strict=True)]
    per_epoch = mix.rows_per_epoch(num_rows)
    rows = total = max(1, sum(per_epoch))
    exact = all(sample.is_complete for sample in samples)
    pairs = list(zip(samples, per_epoch, strict=True))
    if mix.capacity is not None:
        fraction = min(1.0, MAX_PACKED_ROWS / total)
        lengths = np.concatenate([sample.repeat(count * fraction) for sample, count in pairs])
        rows = max(1, round(len(pack_rows(lengths.clip(1, mix.capacity), mix.capacity)) / fraction))
        exact = exact and list(per_epoch) == num_rows and fraction == mix.docs_per_row == 1
    tokens = sum(float(sample.lengths.mean()) * count for sample, count in pairs if len(sample.lengths))
    steps = StepIndex(lambda _: rows, cfg.global_batch_size).num_steps(cfg.epochs)
    return StepCount(steps, total, cfg.epochs, exact, mix.packing, round(cfg.epochs * tokens))


def sample_lengths(config: DatasetConfig, table: RowReader, tokenizer: Tokenizer | None) -> LengthSample:
    """Lengths of some rows. Those that are not tokenized are estimated from the length of their texts."""
    rows = spread_rows(table)
    sizes = np.array([sum(map(len, iter_strings(row.fields))) for row in rows])
    documents = tokenize_rows(config, rows, sizes, tokenizer)
    num_tokens = sum(doc.full_length for docs in documents.values() for doc in docs)
    num_chars = sum(int(sizes[i]) for i, docs in documents.items() if docs)
    if not num_chars and rows and tokenizer is not None:  # all rows are longer than what can be tokenized quickly
        text = max(iter_strings(rows[0].fields), key=len, default="")[:MAX_TOKENIZED_CHARS]
        num_tokens, num_chars = len(tokenizer.model.encode(text).ids), len(text)
    scale = num_tokens / num_chars if num_chars else 1 / BYTES_PER_TOKEN
    long_rows = get_excess_length_strategy(config, table)
    lengths = [
        np.array([len(doc.tokens) for doc in documents[i]], int)
        if i in documents
        else estimate_lengths(config, round(size * scale), *long_rows)
        for i, size in enumerate(sizes)
    ]
    num_docs = config.docs_per_row
    grouped = [row[: len(row) // num_docs * num_docs].reshape(-1, num_docs).sum(1) for row in lengths]
    is_complete = len(documents) == table.count
    return LengthSample(np.concatenate([np.empty(0, int), *grouped]), len(rows), is_complete)


def spread_rows(table: RowReader) -> list[Row]:
    """Up to `NUM_SAMPLED_ROWS` rows from all parts of a dataset. Few others are parsed."""
    assert table.count is not None
    rows, num_seen, num_rows = [], 0, min(NUM_SAMPLED_ROWS, table.count)
    for chunk in table.chunks():
        num_seen += chunk.count
        num_new = -(-num_rows * num_seen // table.count) - len(rows)
        start = min(1, chunk.count - num_new)  # chunks are limited in bytes, so that a long row is often the first
        rows += islice(chunk.rows(), start, start + num_new)
    return [row for row in rows if isinstance(row, Row)]


def tokenize_rows(
    config: DatasetConfig, rows: list[Row], sizes: np.ndarray, tokenizer: Tokenizer | None
) -> dict[int, list[Document]]:
    """Documents of as many rows as can be tokenized quickly, by index. A row that is left out has none."""
    try:
        prepared = None if tokenizer is None else config.prepare_tokenizer(tokenizer)
    except UserError:  # no chat template, which the checks of a run report
        prepared = None
    if prepared is None:
        return {}
    order = np.random.default_rng(0).permutation(len(rows))
    order = order[sizes[order] <= MAX_TOKENIZED_CHARS]
    chosen = order[sizes[order].cumsum() <= MAX_TOKENIZED_CHARS].tolist()
    encoded = config.encode_rows(prepared, [rows[i] for i in chosen])
    return {i: docs if isinstance(docs, list) else [] for i, docs in zip(chosen, encoded, strict=True)}


def estimate_lengths(config: DatasetConfig, num_tokens: int, strategy: str, overlap: int) -> np.ndarray:
    """Lengths of the documents of a row with `num_tokens` tokens, after splitting or truncation."""
    length = max(1, num_tokens // config.docs_per_row)
    if length <= config.max_length:
        return np.full(config.docs_per_row, length)
    if strategy == "drop":
        return np.empty(0, int)
    windows = -(-(length - config.max_length) // (config.max_length - overlap)) if strategy == "split" else 0
    lengths = np.full((windows + 1) * config.docs_per_row, config.max_length)
    if windows:
        lengths[-1] = length - windows * (config.max_length - overlap)
    return lengths
