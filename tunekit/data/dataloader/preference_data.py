"""What the `data:` of a recipe that compares answers may be: pairs or marks, as written or recognised, or a mix."""

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from tunekit.data.dataloader.mixture import MixtureBase, MixtureMemberBase
from tunekit.data.datasets import (
    DatasetConfig,
    DetectedDataset,
    PreferenceBase,
    PreferenceDataset,
    UnpairedPreferenceDataset,
)
from tunekit.data.format_detection import PREFERENCE_RULES
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import Row
from tunekit.errors import UserError

MAX_PROBED_ROWS = 100  # rows that are asked what they are


@dataclass(frozen=True)
class FirstRowDetected(DetectedDataset):
    """Rows that all are what the first is recognised as: of how many documents each is one decides for all."""

    docs_per_row: ClassVar = 2  # at most, as long as nobody has asked

    def resolve(self) -> DatasetConfig:
        """UserError if no row tells."""
        fault = "holds no row"
        for row in islice(
            open_dataset(self.source, self.split, self.max_samples, self.streaming).rows, MAX_PROBED_ROWS
        ):
            try:
                fields = self.transform(row.fields) if isinstance(row, Row) else None
                if fields is not None:
                    return self.detect(fields)
            except UserError as error:
                fault = str(error)
        raise UserError(f"{self.source}: {fault}")


@dataclass(frozen=True)
class AutoPreferenceDataset(PreferenceBase, FirstRowDetected):
    """Pairs or marks, which the columns of the first row tell. This is meant where no `kind` is written.

    `chosen` and `rejected` make pairs; `prompt`, `completion` and `label` marks.
    """

    kind: ClassVar[str] = "auto"
    usual: ClassVar = True
    candidates: ClassVar = (PreferenceDataset, UnpairedPreferenceDataset)
    expected_columns: ClassVar = (
        "it wants columns chosen and rejected, or prompt, completion and label; `transforms` rename them"
    )
    rules: ClassVar = PREFERENCE_RULES


@dataclass(frozen=True)
class PreferenceMixtureMember(MixtureMemberBase):
    """One source of a mix: an epoch of it passes the source `epochs` times; with shares, at most so often.

    A mix with a stream has no epochs: its weights are the shares of each block.
    """

    kind: ClassVar[str] = "part"
    dataset: AutoPreferenceDataset | PreferenceDataset | UnpairedPreferenceDataset


@dataclass(frozen=True)
class PreferenceMixture(MixtureBase):
    """Rows of several sources, all of them pairs or none. Shares are counted in rows.

    Without weights an epoch holds all that its parts give, each its `epochs` or its `cap`. Weights fix the shares, and
    a temperature above 1 evens them out (rows to the power of 1 / temperature).
    """

    kind: ClassVar[str] = "mixture"
    datasets: tuple[PreferenceMixtureMember, ...]


PreferenceData = (
    AutoPreferenceDataset | PreferenceDataset | UnpairedPreferenceDataset | PreferenceMixture
)  # what a recipe that compares or judges answers may read
