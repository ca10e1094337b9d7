"""Numbers of a data set: how long its rows are, what of them is learnt and what is lost, how they are packed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.map_style import describe_rows
from tunekit.data.dataloader.mixture import MixtureBase, dataset_title
from tunekit.data.dataloader.summary import DatasetSummary, format_count
from tunekit.data.readers.row_reader import BadRow
from tunekit.data.row_checks import CheckTarget, format_percent

BINS = 10


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values lie from `edges[i]` up to, but without, `edges[i + 1]`."""

    edges: tuple[int, ...]
    counts: tuple[int, ...]

    def names(self) -> list[str]:
        """Each range, as it is read."""
        pairs = zip(self.edges, self.edges[1:], strict=False)
        return [f"{low:,}" if behind == low + 1 else f"{low:,}-{behind - 1:,}" for low, behind in pairs]


def histogram(values: np.ndarray) -> Histogram:
    """At most some ten ranges with round bounds: of one width, or doubling where few values are far above most."""
    top, middle = int(values.max()), float(np.median(values))
    if top > 16 * max(middle, 1):
        edges = [0, *(1 << power for power in range(max(top.bit_length() - BINS, 2), top.bit_length() + 1))]
    else:
        low = int(values.min())
        width = round_up((top - low) / BINS)
        edges = list(range(low // width * width, top + width + 1, width))
        edges = edges if edges[-2] <= top else edges[:-1]
    counts, _ = np.histogram(values, [*edges[:-1], edges[-1] - 0.5])
    return Histogram(tuple(edges), tuple(counts.tolist()))


def round_up(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, 100 ..."""
    size = 1
    while True:
        for part in (1, 2, 5):
            if part * size >= width:
                return part * size
        size *= 10


@dataclass(frozen=True)
class DatasetStats:
    """What one part of a config holds; tokens and documents are counted as they are trained."""

    part: str
    name: str  # where the rows come from
    sources: tuple[DatasetSummary, ...]
    streamed: bool  # only the first block of rows is looked at
    bad: tuple[BadRow, ...]  # the first rows that nothing can be learnt from
    limit: int  # the most tokens of a row
    each: int  # documents that go together: two are a pair
    rows: int
    tokens: int
    learnt: int
    longest: int
    median: int
    truncated: int
    lost: int  # tokens, cut off
    packed: int | None
    filled: float | None
    batch: int
    steps: int | None  # of an epoch; a stream has none
    lengths: Histogram
    targets: Histogram
    more_bad: int = 0  # rows, behind those of `bad`

    def lines(self) -> Iterator[str]:
        """Sentences for people."""
        if len(self.sources) == 1:
            yield self.sources[0].about
        else:
            yield from (self.mixed(share) for share in self.sources)
        if self.streamed:
            yield "a stream, of which this is the first block"
        share = format_percent(self.learnt / self.tokens)
        kind = "pair" if self.each == 2 else "document"
        yield f"{format_count(self.rows, kind)}, {format_count(self.tokens, 'token')}, {self.learnt:,} learnt ({share})"
        yield f"longest {self.longest:,} tokens, of {self.limit:,} that it may have; the middle one {self.median:,}"
        if self.truncated:
            share = format_percent(self.lost / (self.lost + self.tokens))
            documents, tokens = format_count(self.truncated, "document"), format_count(self.lost, "token")
            yield f"cut at {self.limit:,} tokens: {documents}; {tokens} lost ({share})"
        if self.packed is not None and self.filled is not None:
            packed = (
                f"packed into {format_count(self.packed, 'row')} of {self.limit:,} tokens, {self.filled:.1%} filled"
            )
            yield f"{packed}, {self.rows / self.packed:.1f} in each"
        if self.steps is not None:
            yield f"{format_count(self.steps, 'step')} of {format_count(self.batch, 'row')} in an epoch"
        yield from (f"bad: {bad.where}: {bad.reason}" for bad in self.bad)
        if self.more_bad:
            yield f"and {self.more_bad:,} more bad {'row' if self.more_bad == 1 else 'rows'}"

    def mixed(self, share: DatasetSummary) -> str:
        """What a source gives."""
        rows, tokens = format_percent(share.rows / self.rows), format_percent(share.tokens / self.tokens)
        parts = f"{rows} of the documents, {tokens} of the tokens"
        return f"{share.name}: {share.about}; {parts}, {format_count(share.passes, 'pass')} an epoch"

    def plain(self) -> dict[str, Any]:
        """As data for programs."""
        listed = {name: [one._asdict() for one in vars(self)[name]] for name in ("sources", "bad")}
        return asdict(self) | listed


def shares(mix: MixtureBase, loader: DataLoader) -> tuple[DatasetSummary, ...]:
    """What each source gives. Bad rows are skipped only if the config says so."""
    found = loader.report.shares
    if loader.report.streamed:
        return found
    words = ("bad" if rows.on_bad_row == "error" else "skipped" for rows in mix.sources)
    columns = zip(found, loader.parts, words, strict=True)
    return tuple(share._replace(about=describe_rows(part, share.passes == 1, word)) for share, part, word in columns)


def compute_stats(of: CheckTarget, loader: DataLoader, mix: MixtureBase, bad: tuple[BadRow, ...]) -> DatasetStats:
    """What documents and their order say, under the config's own `mix`, and the first `bad` rows."""
    report, lengths = loader.report, of.lengths
    return DatasetStats(
        of.part,
        dataset_title(mix),
        shares(mix, loader),
        report.streamed,
        bad,
        of.use.limit,
        loader.mix.each,
        report.rows,
        report.tokens,
        report.learnt,
        report.longest,
        int(np.median(lengths)),
        report.truncated,
        int((of.whole.astype(np.int64) - lengths).clip(0).sum()),
        report.packed,
        report.filled,
        loader.layout.batch,
        None if report.streamed else loader.steps(1),
        histogram(lengths),
        histogram(of.measured.targets),
        sum(documents.prepared.skipped for documents in loader.parts) - len(bad),
    )
