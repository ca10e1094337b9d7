"""What an epoch holds, in a line for the log; of a mix, a line for each part."""

from dataclasses import dataclass
from typing import NamedTuple


class DatasetSummary(NamedTuple):
    """One source of an epoch: its rows, its tokens, those that are learnt, and how often it is passed.

    `about` says what was found in the source, and what became of that; `noun` is what its rows are called here: where
    some are split, each part of one counts.
    """

    name: str
    description: str
    rows: int
    tokens: int
    num_target_tokens: int
    passes: float
    noun: str = "row"


def format_count(count: float, noun: str) -> str:
    """`1 row`, `1,800 rows`."""
    number = f"{count:.3g}" if isinstance(count, float) else f"{count:,}"
    return f"{number} {noun}{'' if number == '1' else 'es' if noun.endswith('s') else 's'}"


@dataclass(frozen=True)
class DataSummary:
    """What an epoch holds. `longest` counts tokens, `truncated` documents; `packed` rows hold `capacity` tokens."""

    datasets: tuple[DatasetSummary, ...]
    max_length: int
    num_truncated: int
    num_packed_rows: int | None
    capacity: int | None
    is_streaming: bool = False  # it is about the first block of a stream

    @property
    def rows(self) -> int:
        return sum(share.rows for share in self.datasets)

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.datasets)

    @property
    def num_target_tokens(self) -> int:
        return sum(share.num_target_tokens for share in self.datasets)

    @property
    def fill_ratio(self) -> float | None:
        """The used share of packed rows."""
        return self.tokens / (self.num_packed_rows * self.capacity) if self.num_packed_rows and self.capacity else None

    def __str__(self) -> str:
        parts = [
            format_count(self.rows, "row" if all(share.noun == "row" for share in self.datasets) else "document"),
            format_count(self.tokens, "token"),
            f"{self.num_target_tokens:,} learnt ({self.num_target_tokens / self.tokens:.0%})",
            f"longest {self.max_length:,}",
        ]
        parts += [f"{self.num_truncated:,} truncated"] if self.num_truncated else []
        parts += (
            []
            if self.num_packed_rows is None
            else [f"packed into {format_count(self.num_packed_rows, 'row')}, {self.fill_ratio:.1%} filled"]
        )
        beginning = "a stream, whose first block has " if self.is_streaming else ""
        line = beginning + ", ".join(parts)
        if len(self.datasets) == 1:
            return f"{line} ({self.datasets[0].description})"
        return "\n".join([line, *map(self.format_dataset, self.datasets)])

    def format_dataset(self, share: DatasetSummary) -> str:
        """What one part of a mix is and gives."""
        what = "the block" if self.is_streaming else "an epoch"
        rows = f"{format_count(share.rows, share.noun)} ({share.rows / self.rows:.1%})"
        return (
            f"  {share.name}: {share.description}; {what} takes {rows}, "
            f"{format_count(share.tokens, 'token')} ({share.tokens / self.tokens:.1%})"
            + ("" if self.is_streaming else f", {format_count(share.passes, 'pass')}")
        )
