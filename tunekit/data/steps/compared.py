"""What the `data:` of a recipe that compares answers may be: pairs or marks, as written or recognised, or a mix."""

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from tunekit.data.recognise import COMPARED
from tunekit.data.rows import Compared, Marked, Preference, Recognised, Rows
from tunekit.data.sources.source import open_source
from tunekit.data.sources.table import Row
from tunekit.data.steps.mix import Mixed, Portion
from tunekit.errors import UserError

FIRST = 100  # rows that are asked what they are


@dataclass(frozen=True)
class Alike(Recognised):
    """Rows that all are what the first is recognised as: of how many documents each is one decides for all."""

    EACH: ClassVar = 2  # at most, as long as nobody has asked

    def settled(self) -> Rows:
        """UserError if no row tells."""
        fault = "holds no row"
        for row in islice(open_source(self.source, self.split, self.limit, self.stream).rows, FIRST):
            try:
                fields = self.transformed(row.fields) if isinstance(row, Row) else None
                if fields is not None:
                    return self.choice(fields)
            except UserError as error:
                fault = str(error)
        raise UserError(f"{self.source}: {fault}")


@dataclass(frozen=True)
class Auto(Compared, Alike):
    """Pairs or marks, which the columns of the first row tell. This is meant where no `kind` is written.

    `chosen` and `rejected` make pairs; `prompt`, `completion` and `label` marks.
    """

    kind: ClassVar[str] = "auto"
    usual: ClassVar = True
    KINDS: ClassVar = (Preference, Marked)
    WANTS: ClassVar = "it wants columns chosen and rejected, or prompt, completion and label; `transforms` rename them"
    FIRST: ClassVar = COMPARED


@dataclass(frozen=True)
class Part(Portion):
    """One source of a mix: an epoch of it passes the source `epochs` times; with shares, at most so often.

    A mix with a stream has no epochs: its weights are the shares of each block.
    """

    rows: Auto | Preference | Marked


@dataclass(frozen=True)
class Mix(Mixed):
    """Rows of several sources, all of them pairs or none. Shares are counted in rows.

    Without weights an epoch holds all that its parts give, each its `epochs` or its `cap`. Weights fix the shares, and
    a temperature above 1 evens them out (rows to the power of 1 / temperature).
    """

    kind: ClassVar[str] = "mix"
    parts: tuple[Part, ...]


Comparable = Auto | Preference | Marked | Mix  # what a recipe that compares or judges answers may read
