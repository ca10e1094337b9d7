"""Rows with labels, for models that score: of whole texts, or of each step of an answer."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from tunekit.data import tokenize
from tunekit.data.chat_template import converters
from tunekit.data.chat_template.json_values import json_type
from tunekit.data.chat_template.messages import get_column, get_string, make_conversation, parse_json_cell
from tunekit.data.datasets import SKIP_HINT, ChatTemplateMixin, DatasetConfig, EosTokenMixin, Fields, to_number
from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.data.tokenize import MaskedText
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

LONGEST = 40  # characters of a label that are shown


@dataclass(frozen=True)
class LabeledBase(DatasetConfig):
    """Rows that are read whole for what is said of them."""

    has_document_ids: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.excess_length_strategy == "split":
            raise FieldError(
                "excess_length_strategy", "what is said of a text is not said of its parts: truncate or drop"
            )


@dataclass(frozen=True)
class LabeledDataset(EosTokenMixin, ChatTemplateMixin, LabeledBase):
    """Texts, or conversations that the chat template writes, each with a label.

    It is a number, or one of the names in `class_names`, which stands for its place among them.
    """

    kind: ClassVar[str] = "labeled"
    text_column: str = "text"  # the column
    messages_column: str = "messages"  # the column
    label_column: str = "label"  # the column: a number, true or false, or a name
    class_names: tuple[str, ...] = ()  # the names; a label that is a number then counts them from 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.class_names)) < len(self.class_names):
            raise FieldError("class_names", "name each once")

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        return self.with_chat_template(tokenizer)

    def describe(self, fields: Fields) -> str:
        return f"texts with labels (column {self.label_column!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        value = self.to_number(get_column(fields, self.label_column, "label"))
        found = parse_json_cell(fields.get(self.messages_column))
        if found is not None:
            text = tokenize.render_conversation(
                tokenizer, make_conversation(found, self.messages_column, fields.get("tools")), "all"
            )
        else:
            text = tokenize.render_plain_text(
                get_string(fields, self.text_column, "text"), self.eos_token_id(tokenizer)
            )
        return [text._replace(values=(value,))]

    def to_number(self, label: Any) -> float:
        """What a label is in numbers."""
        if label is None:
            raise UserError(f"{self.label_column}: is null, and a row needs its label: write it, or {SKIP_HINT}")
        if isinstance(label, str):
            if label not in self.class_names:
                raise UserError(f"{self.label_column}: {shortened(label)} {self.text_label_error}")
            return float(self.class_names.index(label))
        value = to_number(label, self.label_column)
        if self.class_names and value not in range(len(self.class_names)):
            raise UserError(
                f"{self.label_column}: {label} counts none of the {len(self.class_names)} `class_names`, from 0 on"
            )
        return value

    @property
    def text_label_error(self) -> str:
        """What is wrong with a label that is a text, and what to do."""
        if self.class_names:
            return f"is none of the `class_names`: {', '.join(self.class_names)}"
        return (
            "needs `class_names`, the names of all (loss=classification), as it is text; a value is a number, unquoted"
        )


def shortened(text: str) -> str:
    """A text as it is quoted in a message."""
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}..")


@dataclass(frozen=True)
class StepwiseDataset(EosTokenMixin, ChatTemplateMixin, LabeledBase):
    """A prompt and the steps of an answer to it, each with a label that stands at its last token: texts, in a row.

    A prompt may also be a list of messages, which the chat template writes: then the steps are what the assistant says
    next. No token is put behind the last step.
    """

    kind: ClassVar[str] = "stepwise"
    prompt_column: str = "prompt"  # the column: a text, or a list of messages
    completions_column: str = "completions"  # the column: a list of texts
    labels_column: str = "labels"  # the column: a list of true or false, or of classes from 0 on
    step_separator: str = "\n"  # what ends each step

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        return self.with_chat_template(tokenizer)

    def describe(self, fields: Fields) -> str:
        return f"steps with labels (columns {self.completions_column!r}, {self.labels_column!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        steps, labels = (
            get_column(fields, self.completions_column, "completions"),
            get_column(fields, self.labels_column, "labels"),
        )
        values, said = self.step_labels(steps, labels), "".join(step + self.step_separator for step in steps)
        found = self.render_answer(tokenizer, fields, said)
        ends = [*accumulate((len(step + self.step_separator) for step in steps), initial=len(found.text) - len(said))]
        return [found._replace(learnt=[*pairwise(ends)], signs=found.doc_flags | DocFlags.STEPWISE, values=values)]

    def render_answer(self, tokenizer: Tokenizer, fields: Fields, said: str) -> MaskedText:
        """The prompt of a row, and behind it the answer as it is."""
        prompt = parse_json_cell(get_column(fields, self.prompt_column, "prompt"))
        if isinstance(prompt, str):
            return tokenize.render_plain_text(prompt + said, self.eos_token_id(tokenizer))
        if not isinstance(prompt, list):
            raise UserError(f"{self.prompt_column}: want a string or a list of messages, this is {json_type(prompt)}")
        found = converters.join_prompt(prompt, said, fields.get("tools"), (self.prompt_column, self.completions_column))
        if [message["role"] for message in found.messages[-2:]] == ["assistant"] * 2:
            raise UserError(
                f"{self.prompt_column}: ends with an assistant message: what it says is the first of the steps"
            )
        return tokenize.render_prompt(tokenizer, found)

    def step_labels(self, steps: Any, labels: Any) -> tuple[float, ...]:
        """The labels of steps, in numbers."""
        if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
            raise UserError(f"{self.completions_column}: want a list of texts, none of them empty")
        if not isinstance(labels, list) or len(labels) != len(steps):
            count = len(labels) if isinstance(labels, list) else json_type(labels)
            raise UserError(f"{self.labels_column}: want a list of {len(steps)}, one for each step, this is {count}")
        values = tuple(to_number(label, self.labels_column) for label in labels)
        if wrong := [value for value in values if value < 0 or value != int(value)]:
            raise UserError(f"{self.labels_column}: want true or false, or classes from 0 on, not {wrong[0]:g}")
        return values

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        if document.loss_mask[1:].sum() < len(text.values):
            raise UserError("two steps end in one token, or the first token ends one: name another `step_separator`")
        return super().limit_length(text, document)
