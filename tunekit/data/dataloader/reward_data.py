"""Datasets of the reward recipe: pairs, labeled texts, answers with labeled steps, or documents for queries."""

from dataclasses import dataclass
from typing import ClassVar, get_args

from tunekit.data.dataloader.preference_data import FirstRowDetected, PreferenceMixture
from tunekit.data.datasets import DatasetConfig, PreferenceDataset, UnsplitRowsBase
from tunekit.data.embedding_datasets import RerankingDataset, RerankingPairsDataset
from tunekit.data.format_detection import REWARD_RULES, FormatRule
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset

RewardFormat = PreferenceDataset | LabeledDataset | StepwiseDataset | RerankingDataset | RerankingPairsDataset


@dataclass(frozen=True)
class AutoRewardDataset(UnsplitRowsBase, FirstRowDetected):
    """Rows whose format is detected from the columns of the first row. The default if `kind` is omitted.

    Columns `chosen` and `rejected` are pairs; `prompt`, `completions` and `labels` are answers with labeled steps;
    `text` or `messages` and `label` are labeled texts. For rerankers: `query`, `document` and `label`; `query`,
    `positive` and `negative`.
    """

    kind: ClassVar[str] = "auto"
    is_default: ClassVar[bool] = True
    candidates: ClassVar[tuple[type[DatasetConfig], ...]] = get_args(RewardFormat)
    rules: ClassVar[tuple[FormatRule, ...]] = REWARD_RULES
    expected_columns: ClassVar[str] = (
        "Expected columns: chosen and rejected; text or messages, and label; prompt, completions and labels; query, "
        "document and label; or query, positive and negative"
    )


RewardData = AutoRewardDataset | RewardFormat | PreferenceMixture  # datasets of the reward recipe
