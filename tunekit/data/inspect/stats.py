"""Statistics of a dataset: row lengths, target tokens, truncation, packing, and steps per epoch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from tunekit.data.check_target import CheckTarget, format_percent
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.map_style import describe_rows
from tunekit.data.dataloader.mixture import MixtureBase, dataset_title
from tunekit.data.dataloader.summary import DatasetSummary, PromptLengths, format_count
from tunekit.data.preprocess.preprocess import read_bad_rows
from tunekit.data.readers.row_reader import BadRow

NUM_BINS = 10
MAX_BAD_ROWS = 5  # bad rows that are listed with their reasons


@dataclass(frozen=True)
class Histogram:
    """Number of values in each bin: `counts[i]` values are in `[edges[i], edges[i + 1])`."""

    edges: tuple[int, ...]
    counts: tuple[int, ...]

    def labels(self) -> list[str]:
        """Format each bin as an inclusive range."""
        pairs = zip(self.edges, self.edges[1:], strict=False)
        return [f"{low:,}" if stop == low + 1 else f"{low:,}-{stop - 1:,}" for low, stop in pairs]


def make_histogram(values: np.ndarray) -> Histogram:
    """Return about 10 bins with round edges, of equal or, for skewed values, of doubling width."""
    top, median = int(values.max()), float(np.median(values))
    if top > 16 * max(median, 1):
        edges = [0, *(1 << power for power in range(max(top.bit_length() - NUM_BINS, 2), top.bit_length() + 1))]
    else:
        low = int(values.min())
        width = round_up((top - low) / NUM_BINS)
        edges = list(range(low // width * width, top + width + 1, width))
        edges = edges if edges[-2] <= top else edges[:-1]
    counts, _ = np.histogram(values, [*edges[:-1], edges[-1] - 0.5])
    return Histogram(tuple(edges), tuple(counts.tolist()))


def round_up(width: float) -> int:
    """Round up to one of 1, 2, 5, 10, 20, 50, 100, ..."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size >= width:
                return factor * size
        size *= 10


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of the dataset of one config key, after tokenization and truncation."""

    config_key: str
    name: str  # source of the rows
    sources: tuple[DatasetSummary, ...]
    streamed: bool  # statistics of the first block of a stream only
    bad: tuple[BadRow, ...]  # the first bad rows
    limit: int  # max_length
    docs_per_item: int  # 2: pairs
    rows: int
    tokens: int
    num_target_tokens: int
    longest: int  # tokens
    median: int  # tokens
    truncated: int  # documents
    lost: int  # tokens removed by truncation
    packed: int | None  # packed rows
    filled: float | None  # fraction of the tokens of packed rows that is used
    batch: int
    steps: int | None  # per epoch; None for streams
    lengths: Histogram
    targets: Histogram | None  # None: prompts, whose answers are sampled in training
    more_bad: int = 0  # bad rows that are not in `bad`
    prompt_lengths: PromptLengths | None = None
    generation: str = ""  # how many answers are sampled and trained on

    def lines(self) -> Iterator[str]:
        """Yield the statistics as lines of text."""
        if len(self.sources) == 1:
            yield self.sources[0].description
        else:
            yield from map(self.describe_source, self.sources)
        if self.streamed:
            yield "streaming: statistics of the first block"
        yield from self.size_lines()
        if self.truncated:
            percent = format_percent(self.lost / (self.lost + self.tokens))
            documents, tokens = format_count(self.truncated, "document"), format_count(self.lost, "token")
            yield f"truncated to {self.limit:,} tokens: {documents}, {tokens} lost ({percent})"
        if self.packed is not None and self.filled is not None:
            rows = f"{format_count(self.packed, 'row')} of {self.limit:,} tokens"
            yield f"packed into {rows}, {self.filled:.1%} filled, {self.rows / self.packed:.1f} per row"
        if self.generation:
            yield self.generation
        elif self.steps is not None:
            yield f"{format_count(self.steps, 'step')} of {format_count(self.batch, 'row')} per epoch"
        yield from (f"bad: {bad.where}: {bad.reason}" for bad in self.bad)
        if self.more_bad:
            yield f"and {self.more_bad:,} more bad {'row' if self.more_bad == 1 else 'rows'}"

    def size_lines(self) -> Iterator[str]:
        """Yield the number of rows, and their tokens."""
        if self.prompt_lengths is not None:
            rows, limit = format_count(self.rows, "prompt"), f"max_length {self.limit:,} with the answer"
            yield f"{rows}, {self.prompt_lengths} ({limit})"
            return
        rows = format_count(self.rows, "pair" if self.docs_per_item == 2 else "document")
        targets = format_count(self.num_target_tokens, "target token")
        percent = format_percent(self.num_target_tokens / self.tokens)
        yield f"{rows}, {format_count(self.tokens, 'token')}, {targets} ({percent})"
        yield f"longest {self.longest:,} tokens (max_length {self.limit:,}), median {self.median:,}"

    def describe_source(self, source: DatasetSummary) -> str:
        """Format the summary of a dataset of a mixture."""
        rows, tokens = format_percent(source.rows / self.rows), format_percent(source.tokens / self.tokens)
        fractions = f"{rows} of the documents, {tokens} of the tokens"
        return f"{source.name}: {source.description}; {fractions}, {format_count(source.passes, 'pass')} per epoch"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with named tuples as dictionaries."""
        sources, bad = ([record._asdict() for record in records] for records in (self.sources, self.bad))
        lengths = None if self.prompt_lengths is None else self.prompt_lengths._asdict()
        return asdict(self) | {"sources": sources, "bad": bad, "prompt_lengths": lengths}


def summarize_sources(mixture: MixtureBase, loader: DataLoader) -> tuple[DatasetSummary, ...]:
    """Return the summary of each dataset, which calls bad rows skipped only if the config skips them."""
    summaries = loader.summary.datasets
    if loader.summary.is_streaming:
        return summaries
    labels = ("bad" if rows.on_bad_row == "error" else "skipped" for rows in mixture.dataset_configs)
    columns = zip(summaries, loader.datasets, labels, strict=True)
    return tuple(
        summary._replace(description=describe_rows(documents, summary.passes == 1, label))
        for summary, documents, label in columns
    )


def compute_stats(target: CheckTarget, loader: DataLoader, mixture: MixtureBase, generation: str) -> DatasetStats:
    """Compute the statistics of tokenized documents. `mixture` is the config's own.

    `generation` describes the answers that are sampled for prompts; empty for other rows.
    """
    summary, lengths = loader.summary, target.lengths
    all_bad_rows = (bad_row for documents in loader.datasets for bad_row in read_bad_rows(documents.summary.bad_rows))
    bad_rows = tuple(islice(all_bad_rows, MAX_BAD_ROWS))
    return DatasetStats(
        target.config_key,
        dataset_title(mixture),
        summarize_sources(mixture, loader),
        summary.is_streaming,
        bad_rows,
        target.context.max_length,
        loader.mixture.docs_per_row,
        summary.rows,
        summary.tokens,
        summary.num_target_tokens,
        summary.max_length,
        int(np.median(lengths)),
        summary.num_truncated,
        int((target.full_lengths.astype(np.int64) - lengths).clip(0).sum()),
        summary.num_packed_rows,
        summary.fill_ratio,
        loader.collator.global_batch_size,
        None if summary.is_streaming else loader.num_steps(1),
        make_histogram(lengths),
        make_histogram(target.stats.targets) if mixture.has_targets else None,
        sum(documents.summary.skipped for documents in loader.datasets) - len(bad_rows),
        summary.prompt_lengths,
        generation,
    )
