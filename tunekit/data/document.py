"""Tokenized documents, and their flags: warnings that data checks report, and properties that losses need."""

from enum import IntFlag
from typing import NamedTuple

import numpy as np

UNEQUAL_WEIGHTS = "message weights between 0 and 1 need recipe sft with a built-in loss. Set weight to 0 or 1."
NO_VALUES = np.empty(0, np.float32)


class DocFlags(IntFlag):
    """Bits of a document. The last six are properties, not warnings.

    `loss_mask` sets MISSING_END_TOKEN and PROMPT_TRAINED, `template_warnings` the other warnings about conversations.
    """

    SPECIAL_IN_TEXT = 1  # a user, system, or tool message contains the text of a special token
    MISSING_END_TOKEN = 2  # the end token of a target turn is not a target: the model is not trained to stop
    PROMPT_TRAINED = 4  # a generation block covers text of the prompt
    TOOLS_NOT_RENDERED = 8  # the row has tools or tool calls that the template does not render
    REASONING_DROPPED = 16  # a target turn has reasoning that the template does not render
    CONTENT_LOST = 32  # message content that is missing in the rendered text
    EMPTY_TURN = 64  # a target turn is empty: the model is trained to stop at once
    FIRST_TOKEN_MERGED = 256  # the first token of a text's answer covers the end of its prompt, and is not a target
    NEGATIVES_UNUSED = 512  # the row has more hard negatives than are used
    DESIRABLE = 1 << 16  # chosen, or labeled as good
    UNDESIRABLE = 1 << 17  # rejected, or labeled as bad
    STEPWISE = 1 << 18  # has a label for each step, at the last token of the step
    SPLIT = 1 << 19  # one of several windows of a row
    WEIGHTED = 1 << 20  # has a loss weight for each target token
    SEGMENTS = 1 << 21  # segments: without a chat template, and a target need not be a complete turn


class Document(NamedTuple):
    """Token ids (length,) int32, mask of target tokens (length,) bool, and length before truncation.

    `values` (values,) float32: label or margin of the document, or one label for each step or weight for each target.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    full_length: int
    doc_flags: DocFlags = DocFlags(0)
    values: np.ndarray = NO_VALUES

    @property
    def value(self) -> float:
        """Label or margin of the document; NaN if it has none."""
        return float("nan") if not len(self.values) or self.has_target_values else float(self.values[0])

    @property
    def has_target_values(self) -> bool:
        """Whether `values` belong to the target tokens: labels of steps, or loss weights."""
        return bool(self.doc_flags & (DocFlags.STEPWISE | DocFlags.WEIGHTED))

    def prefix(self, length: int) -> "Document":
        """First `length` tokens, with the labels or weights of their targets."""
        loss_mask = self.loss_mask[:length]
        values = self.values[: int(loss_mask.sum())] if self.has_target_values else self.values
        return self._replace(tokens=self.tokens[:length], loss_mask=loss_mask, values=values)


def first_target(document: Document) -> int:
    """Position of the first target token, or the length if there is none. The first token is never a target."""
    loss_mask = document.loss_mask[1:]
    return 1 + (int(loss_mask.argmax()) if loss_mask.any() else len(loss_mask))
