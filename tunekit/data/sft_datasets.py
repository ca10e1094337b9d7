"""Datasets of the recipes that train on target tokens: those without a chat template, and the detected format."""

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, get_args

import numpy as np

from tunekit.data.chat_template.messages import get_column
from tunekit.data.column_roles import Columns, column_roles
from tunekit.data.datasets import (
    ChatDataset,
    CompletionDataset,
    DatasetConfig,
    Fields,
    InstructDataset,
    ShareGPTDataset,
    TextDataset,
)
from tunekit.data.detected_dataset import DetectedDataset
from tunekit.data.document import DocFlags, Document
from tunekit.data.readers.row_reader import json_type
from tunekit.data.tokenize import MaskedText
from tunekit.data.tokenizer import Tokenizer, check_encodable
from tunekit.data.truncation import fit_documents
from tunekit.errors import UserError

MASK_COLUMNS = ("completion_mask", "assistant_masks")  # of TRL
IGNORE_INDEX = -100  # label of tokens that are not targets, as in torch.nn.CrossEntropyLoss


@dataclass(frozen=True)
class SegmentsDataset(DatasetConfig):
    """Texts with `train: true` or `train: false`, which are concatenated and tokenized together.

    The texts contain their own special tokens: no chat template is used, and no BOS or EOS token is added. A token that
    crosses the start or end of a target is not a target.
    """

    kind: ClassVar[str] = "segments"
    # Column of the `segments`: a list of {text, train}, or of {text, label}
    columns: Columns = column_roles(segments="segments")

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        items = get_column(fields, self.columns, "segments")
        if not isinstance(items, list):
            raise UserError(f"{self.columns['segments']}: must be a list of segments, got {json_type(items)}")
        segments = [parse_segment(item, f"{self.columns['segments']}[{i}]") for i, item in enumerate(items)]
        text, spans = "", []
        for is_target, group in groupby(segments, itemgetter(1)):
            start, text = len(text), text + "".join(segment for segment, _ in group)
            if is_target and len(text) > start:
                spans.append((start, len(text)))
        check_encodable(text)
        return [MaskedText(text, spans, DocFlags.SEGMENTS)]


def parse_segment(item: Any, path: str) -> tuple[str, bool]:
    """Text of a segment, and whether it is a target: `train`, or `label` as in axolotl."""
    if not isinstance(item, dict) or not isinstance(item.get("text"), str):
        raise UserError(f"{path}: must be an object with a string `text`, and `train`")
    is_target = item.get("label") if item.get("train") is None else item["train"]
    if not isinstance(is_target, bool):
        raise UserError(f"{path}.train: must be true or false, got {json_type(is_target)}")
    return item["text"], is_target


@dataclass(frozen=True)
class PretokenizedDataset(DatasetConfig):
    """Token ids, with the columns of transformers and TRL. Nothing is added to them.

    Target tokens are those that all of the optional columns `labels` (-100: not a target), `completion_mask`, and
    `assistant_masks` select; without any, all tokens. Tokens whose `attention_mask` is 0 are padding and removed.
    """

    kind: ClassVar[str] = "pretokenized"
    columns: Columns = column_roles(input_ids="input_ids")  # Column of the token ids

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        name = self.column("input_ids")
        tokens = to_integers(get_column(fields, self.columns, "input_ids"), name, (0, 2**31 - 1))
        columns = {name: fields[name] for name in (*MASK_COLUMNS, "attention_mask") if fields.get(name) is not None}
        masks = {name: to_integers(column, name, (0, 1), len(tokens)) != 0 for name, column in columns.items()}
        is_token = masks.pop("attention_mask", np.ones(len(tokens), bool))
        if np.count_nonzero(np.diff(is_token, prepend=False, append=False)) > 2:
            raise UserError("attention_mask: zeros must be padding at the start or the end of the row")
        if fields.get("labels") is not None:
            masks["labels"] = targets_of_labels(fields["labels"], tokens)
        loss_mask = np.logical_and.reduce([is_token, *masks.values()])
        document = Document(tokens[is_token], loss_mask[is_token], int(is_token.sum()))
        return [MaskedText("", [], document=document)]


def to_integers(values: Any, name: str, bounds: tuple[int, int], length: int | None = None) -> np.ndarray:
    """Integers of a column, (length,) int32. Raise UserError for other values, or for another length."""
    low, high = bounds
    if not isinstance(values, list) or not all(isinstance(value, int) and low <= value <= high for value in values):
        raise UserError(f"{name}: must be a list of integers from {low} to {high:,}")
    if length not in (None, len(values)):
        raise UserError(f"{name}: must have {length:,} items, one for each token, got {len(values):,}")
    return np.array(values, np.int32)


def targets_of_labels(labels: Any, tokens: np.ndarray) -> np.ndarray:
    """Mask of the target tokens (length,). A label is the id of its own token: the model shifts them."""
    values = to_integers(labels, "labels", (IGNORE_INDEX, 2**31 - 1), len(tokens))
    invalid = np.flatnonzero((values != tokens) & (values != IGNORE_INDEX))
    if len(invalid):
        i = int(invalid[0])
        expected = f"{IGNORE_INDEX} or the token id {tokens[i]}"
        raise UserError(f"labels[{i}]: must be {expected}, got {values[i]}. Do not shift the labels")
    return values != IGNORE_INDEX


SFTFormat = (
    ChatDataset
    | ShareGPTDataset
    | InstructDataset
    | CompletionDataset
    | TextDataset
    | SegmentsDataset
    | PretokenizedDataset
)


@dataclass(frozen=True)
class AutoDataset(DetectedDataset):
    """Rows whose format is detected from their columns. The default if `kind` is omitted.

    The first match is used: `input_ids`, `messages` or `conversations` (OpenAI or ShareGPT), `segments`, `prompt` and
    `completion`, `instruction` and `output`, `text`. Plain texts are split into several rows unless they are dropped.
    """

    kind: ClassVar[str] = "auto"
    is_default: ClassVar[bool] = True
    candidates: ClassVar[tuple[type[DatasetConfig], ...]] = get_args(SFTFormat)
    expected_columns: ClassVar[str] = "Set a supported `kind`, or use the recipe `preference` for preference data"

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        if text.is_continuable and self.excess_length_strategy == "truncate":
            return fit_documents(document, self.max_length, "split", 1)
        return super().limit_length(text, document)


SFTDataset = AutoDataset | SFTFormat  # datasets of the recipes that train on target tokens
