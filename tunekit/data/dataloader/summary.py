"""Summary of an epoch for the log: one line, and one more line for each dataset of a mixture."""

from dataclasses import dataclass
from typing import NamedTuple


class DatasetSummary(NamedTuple):
    """Statistics of one dataset in an epoch.

    `description` is the row format and the result of preprocessing. `noun` is what `rows` counts: "row", "document" if
    rows are split, or "prompt".
    """

    name: str
    description: str
    rows: int
    tokens: int
    num_target_tokens: int
    passes: float
    noun: str = "row"


class PromptLengths(NamedTuple):
    """Tokens of the shortest, the median and the longest prompt."""

    minimum: int
    median: int
    maximum: int

    def __str__(self) -> str:
        return f"tokens per prompt: min {self.minimum:,}, median {self.median:,}, max {self.maximum:,}"


def format_count(count: float, noun: str) -> str:
    """Format a count with its noun: `1 row`, `1,800 rows`."""
    number = f"{count:.3g}" if isinstance(count, float) else f"{count:,}"
    return f"{number} {noun}{'' if number == '1' else 'es' if noun.endswith('s') else 's'}"


@dataclass(frozen=True)
class DataSummary:
    """Statistics of an epoch, or of the first block of a stream.

    `max_length` is in tokens. `num_truncated` counts documents. The `num_packed_rows` rows have `capacity` tokens each.
    """

    datasets: tuple[DatasetSummary, ...]
    max_length: int
    num_truncated: int
    num_packed_rows: int | None
    capacity: int | None
    is_streaming: bool = False
    prompt_lengths: PromptLengths | None = None  # of prompts, which have no target tokens

    @property
    def rows(self) -> int:
        return sum(dataset.rows for dataset in self.datasets)

    @property
    def tokens(self) -> int:
        return sum(dataset.tokens for dataset in self.datasets)

    @property
    def num_target_tokens(self) -> int:
        return sum(dataset.num_target_tokens for dataset in self.datasets)

    @property
    def fill_ratio(self) -> float | None:
        """Fraction of the tokens of packed rows that is used; None without packing."""
        if not self.num_packed_rows or not self.capacity:
            return None
        return self.tokens / (self.num_packed_rows * self.capacity)

    def __str__(self) -> str:
        nouns = {dataset.noun for dataset in self.datasets}
        stats = [format_count(self.rows, nouns.pop() if len(nouns) == 1 else "document")]
        if self.prompt_lengths is not None:
            stats.append(str(self.prompt_lengths))
        else:
            targets = f"{self.num_target_tokens:,} target tokens ({self.num_target_tokens / self.tokens:.0%})"
            stats += [format_count(self.tokens, "token"), targets, f"longest {self.max_length:,}"]
        if self.num_truncated:
            stats.append(f"{self.num_truncated:,} truncated")
        if self.num_packed_rows is not None:
            stats.append(f"packed into {format_count(self.num_packed_rows, 'row')}, {self.fill_ratio:.1%} filled")
        line = ("a stream, whose first block has " if self.is_streaming else "") + ", ".join(stats)
        if len(self.datasets) == 1:
            return f"{line} ({self.datasets[0].description})"
        return "\n".join([line, *map(self.format_dataset, self.datasets)])

    def format_dataset(self, dataset: DatasetSummary) -> str:
        """Line of one dataset of a mixture."""
        scope = "the block" if self.is_streaming else "an epoch"
        rows = f"{format_count(dataset.rows, dataset.noun)} ({dataset.rows / self.rows:.1%})"
        tokens = f"{format_count(dataset.tokens, 'token')} ({dataset.tokens / self.tokens:.1%})"
        passes = "" if self.is_streaming else f", {format_count(dataset.passes, 'pass')}"
        return f"  {dataset.name}: {dataset.description}; {scope} uses {rows}, {tokens}{passes}"
