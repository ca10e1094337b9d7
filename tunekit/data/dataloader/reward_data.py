"""What the `data:` of a recipe for models that score may be: pairs, labels or judged steps, or a mix of pairs."""

from dataclasses import dataclass
from typing import ClassVar

from tunekit.data.dataloader.preference_data import FirstRowDetected, PreferenceMixture
from tunekit.data.datasets import PreferenceDataset
from tunekit.data.format_detection import REWARD_RULES
from tunekit.data.reward_datasets import LabeledBase, LabeledDataset, StepwiseDataset


@dataclass(frozen=True)
class AutoRewardDataset(LabeledBase, FirstRowDetected):
    """What the columns of the first row tell. This is meant where no `kind` is written.

    `chosen` and `rejected` make pairs; `prompt`, `completions` and `labels` steps that are judged; `text` or `messages`
    and `label` texts with labels.
    """

    kind: ClassVar[str] = "auto"
    usual: ClassVar = True
    candidates: ClassVar = (PreferenceDataset, LabeledDataset, StepwiseDataset)
    rules: ClassVar = REWARD_RULES
    expected_columns: ClassVar = (
        "it wants chosen and rejected; text or messages, and label; or prompt, completions and labels"
    )


RewardData = (
    AutoRewardDataset | PreferenceDataset | LabeledDataset | StepwiseDataset | PreferenceMixture
)  # what a recipe for models that score may read
