"""Datasets of the reward recipe: pairs, labeled texts, or answers with labeled steps, or a mixture of pairs."""

from dataclasses import dataclass
from typing import ClassVar

from tunekit.data.dataloader.preference_data import FirstRowDetected, PreferenceMixture
from tunekit.data.datasets import DatasetConfig, PreferenceDataset, UnsplitRowsBase
from tunekit.data.format_detection import REWARD_RULES, FormatRule
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset


@dataclass(frozen=True)
class AutoRewardDataset(UnsplitRowsBase, FirstRowDetected):
    """Rows whose format is detected from the columns of the first row. The default if `kind` is omitted.

    Columns `chosen` and `rejected` are pairs; `prompt`, `completions` and `labels` are answers with labeled steps;
    `text` or `messages` and `label` are labeled texts.
    """

    kind: ClassVar[str] = "auto"
    is_default: ClassVar[bool] = True
    candidates: ClassVar[tuple[type[DatasetConfig], ...]] = (PreferenceDataset, LabeledDataset, StepwiseDataset)
    rules: ClassVar[tuple[FormatRule, ...]] = REWARD_RULES
    expected_columns: ClassVar[str] = (
        "Expected columns: chosen and rejected; text or messages, and label; or prompt, completions and labels"
    )


# Datasets of the reward recipe.
RewardData = AutoRewardDataset | PreferenceDataset | LabeledDataset | StepwiseDataset | PreferenceMixture
