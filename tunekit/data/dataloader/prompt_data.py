"""Datasets of recipes whose model generates the answers: prompts, with columns for rewards and environments."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from tunekit.data.chat_template import converters
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import Conversation, get_column, json_type, make_conversation, parse_json_cell
from tunekit.data.dataloader.mixture import MixtureBase, MixtureMemberBase
from tunekit.data.datasets import ChatTemplateMixin, Fields
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.data.tokenize import MaskedText, bos_ids
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import TooLong
from tunekit.errors import FieldError, UserError

MESSAGES = "messages"  # column of conversations, for rows without a prompt


@dataclass(frozen=True)
class PromptDataset(ChatTemplateMixin):
    """Prompts: texts, or conversations whose last message is not an answer. All columns are kept for rewards.

    Rows without a prompt column may have `messages`, as in supervised fine-tuning; answers at their end are left out.
    Optional columns: `system`, and `tools`, which has tool schemas. `max_length` limits a prompt together with the
    tokens that follow it.
    """

    kind: ClassVar[str] = "prompt"
    is_default: ClassVar[bool] = True
    has_targets: ClassVar[bool] = False
    prompt_column: str = "prompt"  # Column of the prompt: a text, or a list of messages
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
        return f"prompts (column {self.prompt_column if self.prompt_column in fields else MESSAGES!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        tokens = np.array(self.encode_prompt(tokenizer, fields), np.int32)
        document = Document(tokens, np.ones(len(tokens), bool), len(tokens))
        return [MaskedText("", [], document=document)]

    def encode_prompt(self, tokenizer: Tokenizer, fields: Fields) -> list[int]:
        """Token ids of a prompt, up to the start of the answer."""
        prompt = self.to_conversation(fields)
        if self.is_plain_text(tokenizer, fields):
            if prompt.tools or len(prompt.messages) > 1:
                problem = "system message" if len(prompt.messages) > 1 else "tools"
                raise UserError(f"{problem}: a text to continue has none. Use a chat template, or remove the column")
            return [*bos_ids(tokenizer).tolist(), *tokenizer.encode(prompt.messages[-1]["content"])]
        return encode_conversation(tokenizer, prompt.messages, prompt.tools)

    def is_plain_text(self, tokenizer: Tokenizer, fields: Fields) -> bool:
        """Whether a prompt is a text that the model continues."""
        value = parse_json_cell(fields.get(self.prompt_column))
        if not isinstance(value, str) or self.prompt_format == "chat" or self.system_prompt is not None:
            return False
        return self.prompt_format == "text" or not tokenizer.templates

    def to_conversation(self, fields: Fields) -> Conversation:
        """Messages of a prompt and its tools. Raise UserError if nothing is left to answer."""
        column = self.prompt_column
        if column not in fields and self.prompt_column == "prompt" and MESSAGES in fields:
            column = MESSAGES
        value = parse_json_cell(get_column(fields, column, "prompt_column"))
        if not isinstance(value, str | list):
            raise UserError(f"{column}: expected a text or a list of messages, got {json_type(value)}")
        conversation = make_conversation(converters.to_messages(value, "user", column), column, fields.get("tools"))
        conversation = converters.with_system(conversation, converters.get_system(fields), column)
        messages = conversation.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise UserError(f"{column}: has no message to answer. The last message must be of role user or tool")
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return conversation._replace(messages=messages)

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
