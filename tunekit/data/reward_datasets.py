"""Datasets with labels for reward models: labeled texts, or answers with a label for each step."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from tunekit.data import tokenize
from tunekit.data.cell_values import SKIP_HINT, to_number
from tunekit.data.chat_template import converters
from tunekit.data.chat_template.messages import (
    format_value,
    get_column,
    get_string,
    json_type,
    make_conversation,
    parse_json_cell,
)
from tunekit.data.column_roles import Columns, column_roles
from tunekit.data.datasets import ChatTemplateMixin, EosTokenMixin, Fields, UnsplitRowsBase
from tunekit.data.document import DocFlags, Document
from tunekit.data.embedding_datasets import WholeTextDataset
from tunekit.data.tokenize import MaskedText
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError


@dataclass(frozen=True)
class LabeledDataset(WholeTextDataset, ChatTemplateMixin):
    """Texts, or conversations that the chat template renders, each with a label.

    Texts get the special tokens that the tokenizer adds, and nothing else, as in a pipeline of transformers. A label is
    a number, or one of `class_names`, which stands for its index.
    """

    kind: ClassVar[str] = "labeled"
    # Columns of the `text`, or of the `messages`, which are used instead of the text if a row has them, and of the
    # `label`: a number, true or false, or a class name
    columns: Columns = column_roles(text="text", messages="messages", label="label")
    class_names: tuple[str, ...] = ()  # Class names, in the order of their labels; numeric labels are then indices

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.class_names)) < len(self.class_names):
            raise FieldError("class_names", "must not contain a name twice")

    def describe(self, fields: Fields) -> str:
        return f"texts with labels (column {self.columns['label']!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        value = self.label_value(get_column(fields, self.columns, "label"))
        messages = parse_json_cell(fields.get(self.column("messages")))
        if messages is None:
            return [self.encode(tokenizer, [get_string(fields, self.columns, "text")], value)]
        conversation = make_conversation(messages, self.column("messages"), fields.get("tools"))
        conversation = converters.with_system(conversation, converters.get_system(fields), self.column("messages"))
        return [tokenize.render_conversation(tokenizer, conversation, "all")._replace(values=(value,))]

    def label_value(self, label: Any) -> float:
        """Number of a label."""
        if label is None:
            raise UserError(f"{self.columns['label']}: the label is null. {SKIP_HINT}")
        if isinstance(label, str):
            if label not in self.class_names:
                raise UserError(f"{self.columns['label']}: {format_value(label)} {self.text_label_error}")
            return float(self.class_names.index(label))
        value = to_number(label, self.column("label"))
        if self.class_names and value not in range(len(self.class_names)):
            raise UserError(
                f"{self.columns['label']}: must be an index into the {len(self.class_names)} `class_names`, got {label}"
            )
        return value

    @property
    def text_label_error(self) -> str:
        """Why a text is not a valid label, and what to do."""
        if self.class_names:
            return f"is not one of `class_names`: {', '.join(self.class_names)}"
        return "is text. Set `class_names` (loss=classification), or remove the quotes of a number"


@dataclass(frozen=True)
class StepwiseDataset(UnsplitRowsBase, EosTokenMixin, ChatTemplateMixin):
    """A prompt and the steps of an answer, each with a label at its last token.

    The prompt is text, or a list of messages that the chat template renders; the steps then continue the assistant
    turn. No EOS token follows the last step.
    """

    kind: ClassVar[str] = "stepwise"
    # Columns of the `prompt` (text, or a list of messages), the steps (`completions`: a list of texts), and their
    # `labels` (a list of true or false, or of class indices)
    columns: Columns = column_roles(prompt="prompt", completions="completions", labels="labels")
    step_separator: str = "\n"  # Text after each step

    def describe(self, fields: Fields) -> str:
        return f"steps with labels (columns {self.columns['completions']!r}, {self.columns['labels']!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        steps = get_column(fields, self.columns, "completions")
        labels = get_column(fields, self.columns, "labels")
        values, answer = self.step_labels(steps, labels), "".join(step + self.step_separator for step in steps)
        text = self.render_answer(tokenizer, fields, answer)
        lengths = (len(step + self.step_separator) for step in steps)
        ends = [*accumulate(lengths, initial=len(text.text) - len(answer))]
        flags = text.doc_flags | DocFlags.STEPWISE
        return [text._replace(target_spans=[*pairwise(ends)], doc_flags=flags, values=values)]

    def render_answer(self, tokenizer: Tokenizer, fields: Fields, answer: str) -> MaskedText:
        """Render the prompt of a row, followed by the unchanged answer."""
        prompt = parse_json_cell(get_column(fields, self.columns, "prompt"))
        if isinstance(prompt, str):
            return tokenize.render_plain_text(prompt + answer, self.eos_token_id(tokenizer))
        if not isinstance(prompt, list):
            raise UserError(f"{self.columns['prompt']}: must be text or a list of messages, got {json_type(prompt)}")
        columns = self.column("prompt"), self.column("completions")
        system = converters.get_system(fields)
        conversation = converters.join_prompt(prompt, answer, fields.get("tools"), columns, system)
        if [message["role"] for message in conversation.messages[-2:]] == ["assistant"] * 2:
            raise UserError(
                f"{self.columns['prompt']}: must not end with an assistant message. Make it the first of the steps"
            )
        return tokenize.render_prompt(tokenizer, conversation)

    def step_labels(self, steps: Any, labels: Any) -> tuple[float, ...]:
        """Numbers of the labels of all steps."""
        if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
            raise UserError(f"{self.columns['completions']}: must be a list of non-empty texts")
        if not isinstance(labels, list) or len(labels) != len(steps):
            count = len(labels) if isinstance(labels, list) else json_type(labels)
            raise UserError(
                f"{self.columns['labels']}: must be a list of {len(steps)} labels, one per step, got {count}"
            )
        values = tuple(to_number(label, self.column("labels")) for label in labels)
        if invalid := [value for value in values if value < 0 or value != int(value)]:
            raise UserError(f"{self.columns['labels']}: must be true, false, or class indices, got {invalid[0]:g}")
        return values

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        if document.loss_mask[1:].sum() < len(text.values):
            raise UserError(
                "two steps end in the same token, or the first token ends a step. Set another `step_separator`"
            )
        return super().limit_length(text, document)
