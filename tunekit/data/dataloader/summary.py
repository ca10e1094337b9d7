"""What an epoch holds, in a line for the log; of a mix, a line for each part."""

from dataclasses import dataclass
from typing import NamedTuple


class DatasetSummary(NamedTuple):
    """One source of an epoch: its rows, its tokens, those that are learnt, and how often it is passed.

    `about` says what was found in the source, and what became of that; `noun` is what its rows are called here: where
    some are split, each part of one counts.
    """

    name: str
    about: str
    rows: int
    tokens: int
    learnt: int
    passes: float
    noun: str = "row"


def format_count(count: float, noun: str) -> str:
    """`1 row`, `1,800 rows`."""
    number = f"{count:.3g}" if isinstance(count, float) else f"{count:,}"
    return f"{number} {noun}{'' if number == '1' else 'es' if noun.endswith('s') else 's'}"


@dataclass(frozen=True)
class DataSummary:
    """What an epoch holds. `longest` counts tokens, `truncated` documents; `packed` rows hold `capacity` tokens."""

    shares: tuple[DatasetSummary, ...]
    longest: int
    truncated: int
    packed: int | None
    capacity: int | None
    streamed: bool = False  # it is about the first block of a stream

    @property
    def rows(self) -> int:
        return sum(share.rows for share in self.shares)

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.shares)

    @property
    def learnt(self) -> int:
        return sum(share.learnt for share in self.shares)

    @property
    def filled(self) -> float | None:
        """The used share of packed rows."""
        return self.tokens / (self.packed * self.capacity) if self.packed and self.capacity else None

    def __str__(self) -> str:
        parts = [
            format_count(self.rows, "row" if all(share.noun == "row" for share in self.shares) else "document"),
            format_count(self.tokens, "token"),
            f"{self.learnt:,} learnt ({self.learnt / self.tokens:.0%})",
            f"longest {self.longest:,}",
        ]
        parts += [f"{self.truncated:,} truncated"] if self.truncated else []
        parts += (
            [] if self.packed is None else [f"packed into {format_count(self.packed, 'row')}, {self.filled:.1%} filled"]
        )
        beginning = "a stream, whose first block has " if self.streamed else ""
        line = beginning + ", ".join(parts)
        if len(self.shares) == 1:
            return f"{line} ({self.shares[0].about})"
        return "\n".join([line, *map(self.line, self.shares)])

    def line(self, share: DatasetSummary) -> str:
        """What one part of a mix is and gives."""
        what = "the block" if self.streamed else "an epoch"
        rows = f"{format_count(share.rows, share.noun)} ({share.rows / self.rows:.1%})"
        return (
            f"  {share.name}: {share.about}; {what} takes {rows}, "
            f"{format_count(share.tokens, 'token')} ({share.tokens / self.tokens:.1%})"
            + ("" if self.streamed else f", {format_count(share.passes, 'pass')}")
        )
