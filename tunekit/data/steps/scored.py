"""What the `data:` of a recipe for models that score may be: pairs, labels or judged steps, or a mix of pairs."""

from dataclasses import dataclass
from typing import ClassVar

from tunekit.data.labels import Judged, Labelled, Stepped
from tunekit.data.recognise import SCORED
from tunekit.data.rows import Preference
from tunekit.data.steps.compared import Alike, Mix


@dataclass(frozen=True)
class Auto(Judged, Alike):
    """What the columns of the first row tell. This is meant where no `kind` is written.

    `chosen` and `rejected` make pairs; `prompt`, `completions` and `labels` steps that are judged; `text` or `messages`
    and `label` texts with labels.
    """

    kind: ClassVar[str] = "auto"
    usual: ClassVar = True
    KINDS: ClassVar = (Preference, Labelled, Stepped)
    FIRST: ClassVar = SCORED
    WANTS: ClassVar = "it wants chosen and rejected; text or messages, and label; or prompt, completions and labels"


Scored = Auto | Preference | Labelled | Stepped | Mix  # what a recipe for models that score may read
