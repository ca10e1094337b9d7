"""Datasets of the preference recipe: pairs or unpaired answers, given as `kind` or detected, or a mixture."""

from dataclasses import dataclass
from typing import ClassVar

from tunekit.data.dataloader.mixture import MixtureBase, MixtureMemberBase
from tunekit.data.datasets import (
    DatasetConfig,
    PreferenceBase,
    PreferenceDataset,
    UnpairedPreferenceDataset,
)
from tunekit.data.detected_dataset import DetectedDataset
from tunekit.data.format_detection import PREFERENCE_RULES, FormatRule
from tunekit.data.preprocess.preprocess import detect_first_row


@dataclass(frozen=True)
class FirstRowDetected(DetectedDataset):
    """Rows of one format, detected from the first row: all rows must have the same number of documents."""

    @property
    def docs_per_row(self) -> int:
        return 2  # upper bound until `resolve`

    def resolve(self) -> DatasetConfig:
        """Config of the detected format. Raise UserError if no row can be read."""
        return detect_first_row(self, self.detect).resolve()


@dataclass(frozen=True)
class AutoPreferenceDataset(PreferenceBase, FirstRowDetected):
    """Pairs or unpaired answers, detected from the columns of the first row. The default if `kind` is omitted.

    Columns `chosen` and `rejected` are pairs; `prompt`, `completion` and `label` are unpaired answers.
    """

    kind: ClassVar[str] = "auto"
    is_default: ClassVar[bool] = True
    candidates: ClassVar[tuple[type[DatasetConfig], ...]] = (PreferenceDataset, UnpairedPreferenceDataset)
    expected_columns: ClassVar[str] = (
        "Expected columns: chosen and rejected; or prompt, completion and label. Rename columns with `transforms`"
    )
    rules: ClassVar[tuple[FormatRule, ...]] = PREFERENCE_RULES


@dataclass(frozen=True)
class PreferenceMixtureMember(MixtureMemberBase):
    """One dataset of a mixture. An epoch contains it `repeat` times; with weights, at most.

    Mixtures with streaming data have no epochs: weights are fractions of each block.
    """

    kind: ClassVar[str] = "part"
    dataset: AutoPreferenceDataset | PreferenceDataset | UnpairedPreferenceDataset


@dataclass(frozen=True)
class PreferenceMixture(MixtureBase):
    """Rows of several datasets, all of them pairs or none. Fractions are counted in rows.

    Without weights, an epoch contains all rows of all datasets, subject to `repeat` and `max_samples_per_epoch`.
    Weights set the fractions. A temperature above 1 makes them more even (rows to the power of 1 / temperature).
    """

    kind: ClassVar[str] = "mixture"
    datasets: tuple[PreferenceMixtureMember, ...]


# Datasets of the preference recipe.
PreferenceData = AutoPreferenceDataset | PreferenceDataset | UnpairedPreferenceDataset | PreferenceMixture
