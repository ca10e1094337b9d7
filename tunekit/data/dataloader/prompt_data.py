"""Datasets of recipes whose model generates the answers: prompts, with columns for rewards and environments."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.column_roles import Columns, column_roles
from tunekit.data.dataloader.mixture import MixtureBase, MixtureMemberBase
from tunekit.data.datasets import ChatTemplateMixin, Fields
from tunekit.data.document import Document
from tunekit.data.prompts import Prompt, read_prompt
from tunekit.data.tokenize import MaskedText, encode_text
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import TooLong
from tunekit.errors import FieldError, UserError


@dataclass(frozen=True)
class PromptDataset(ChatTemplateMixin):
    """Prompts: texts, or conversations. All columns are kept for rewards.

    Rows without a prompt column may be conversations in any format of supervised fine-tuning. Answers at the end of a
    conversation are left out; the last one is the column `answer`, unless the row has one. Optional columns: `system`,
    and `tools`, which has tool schemas. `max_length` limits a prompt together with the tokens that follow it.
    """

    kind: ClassVar[str] = "prompt"
    is_default: ClassVar[bool] = True
    has_targets: ClassVar[bool] = False
    columns: Columns = column_roles(prompt="prompt")  # Column of the `prompt`: a text, or a list of messages
    # Texts are `chat` messages of the user, or plain `text` to continue; `auto`: chat if there is a chat template
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    system_prompt: str | None = None  # System message of prompts that have none
    max_prompt_length: int | None = None  # Drop rows with more prompt tokens; null: those that fill `max_length`
    excess_length_strategy: TooLong = "drop"  # Prompts are never truncated or split

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming:
            raise FieldError(
                "streaming", "prompts cannot be streamed. Set streaming=false; max_samples limits the rows."
            )
        if self.excess_length_strategy != "drop":
            raise FieldError("excess_length_strategy", f"must be drop, got {self.excess_length_strategy}")
        if self.max_prompt_length is not None and not 0 < self.max_prompt_length < self.max_length:
            problem = f"must be >= 1 and less than max_length={self.max_length:,}, got {self.max_prompt_length}"
            raise FieldError("max_prompt_length", problem)
        if self.system_prompt is not None and self.prompt_format == "text":
            raise FieldError("system_prompt", "needs a chat template, and prompt_format is text. Remove one of them.")

    def describe(self, fields: Fields) -> str:
        return f"prompts (column {self.read_prompt(fields).conversation.column!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        tokens = np.array(self.encode_prompt(tokenizer, self.read_prompt(fields)), np.int32)
        document = Document(tokens, np.ones(len(tokens), bool), len(tokens))
        return [MaskedText("", [], document=document)]

    def read_prompt(self, fields: Fields) -> Prompt:
        """The prompt of a row. Raise UserError if there is nothing to answer."""
        return read_prompt(fields, self.column("prompt"), self.system_prompt)

    def encode_prompt(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, up to the start of the answer."""
        if prompt.text is not None and self.is_plain_text(tokenizer, prompt):
            if prompt.conversation.tools or len(prompt.conversation.messages) > 1:
                name = "tools" if prompt.conversation.tools else "system"
                raise UserError(f"{name}: a text to continue has none. Use a chat template, or remove the column")
            return encode_text(tokenizer, prompt.text)
        return encode_conversation(tokenizer, prompt.conversation.messages, prompt.conversation.tools)

    def is_plain_text(self, tokenizer: Tokenizer, prompt: Prompt) -> bool:
        """Whether a prompt is a text that the model continues."""
        if prompt.text is None or self.prompt_format == "chat" or self.system_prompt is not None:
            return False
        return self.prompt_format == "text" or not tokenizer.templates

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        limit = self.max_length - 1 if self.max_prompt_length is None else self.max_prompt_length
        return [document] if len(document.tokens) <= limit else []


@dataclass(frozen=True)
class PromptMixtureMember(MixtureMemberBase):
    """One dataset of a mixture. An epoch contains it `repeat` times; with weights, at most."""

    kind: ClassVar[str] = "part"
    dataset: PromptDataset


@dataclass(frozen=True)
class PromptMixture(MixtureBase):
    """Prompts of several datasets. Fractions are counted in prompts.

    Without weights, an epoch contains all rows of all datasets, subject to `repeat` and `max_samples_per_epoch`.
    Weights set the fractions. A temperature above 1 makes them more even (rows to the power of 1 / temperature).
    """

    kind: ClassVar[str] = "mixture"
    datasets: tuple[PromptMixtureMember, ...]


PromptData = PromptDataset | PromptMixture  # datasets of the recipes that sample answers
