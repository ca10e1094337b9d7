"""Datasets of rows whose format is detected from their columns."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tunekit.config.choices import kind_name
from tunekit.data.chat_template.messages import Conversation
from tunekit.data.datasets import DatasetConfig, TextOrChatMixin
from tunekit.data.format_detection import FormatRule, RowFormat, detect_format
from tunekit.data.tokenize import MaskedText
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Fields
from tunekit.errors import UserError


@dataclass(frozen=True)
class DetectedDataset(TextOrChatMixin):
    """Rows whose format is detected from their columns."""

    accepts_any_key: ClassVar[bool] = True  # another kind keeps the keys that are set here
    candidates: ClassVar[tuple[type[DatasetConfig], ...]]  # supported formats
    expected_columns: ClassVar[str]  # remedy for rows of other formats
    rules: ClassVar[tuple[FormatRule, ...]] = ()  # tried before the common rules

    @cached_property
    def detected(self) -> dict[RowFormat, DatasetConfig]:
        """Configs of the formats that were detected so far, with the keys of this config."""
        return {}

    def detect(self, fields: Fields) -> DatasetConfig:
        """Config of the format of a row."""
        row_format = detect_format(fields, self.rules)
        if row_format not in self.detected:
            self.detected[row_format] = self.make_config(row_format)
        return self.detected[row_format]

    def make_config(self, row_format: RowFormat) -> DatasetConfig:
        """Config of a format. Raise UserError if it is not one of the candidates."""
        cls = next((cls for cls in self.candidates if kind_name(cls) == row_format.kind), None)
        if cls is None:
            raise UserError(f"this recipe does not support {row_format.description}. {self.expected_columns}")
        names = {item.name for item in dataclasses.fields(cls)} & {item.name for item in dataclasses.fields(self)}
        names -= {"columns"}
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return cls(**values, columns=dict(row_format.columns))

    def describe(self, fields: Fields) -> str:
        return detect_format(fields, self.rules).description

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        return self.detect(dict(fields)).render(tokenizer, fields)  # a copy: the detection reads other columns too

    def prompt_conversation(self, fields: Fields) -> Conversation | None:
        return self.detect(fields).prompt_conversation(fields)
