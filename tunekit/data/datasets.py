"""The choices of a recipe's `data:`: what a row is and which of its tokens are learnt."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from tunekit.config.choices import kind_name
from tunekit.data import tokenize
from tunekit.data.chat_template import converters
from tunekit.data.chat_template.json_values import json_type
from tunekit.data.chat_template.messages import Conversation, get_column, get_string, make_conversation, parse_json_cell
from tunekit.data.doc_flags import DocFlags
from tunekit.data.format_detection import FormatRule, RowFormat, detect_format
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.data.readers.open_dataset import find_data_files, parse_split
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.row_errors import blame
from tunekit.data.tokenize import MaskedText, TrainOn
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Filter, RenameColumns
from tunekit.data.truncation import TooLong, fit_documents
from tunekit.errors import FieldError, UserError

EncodedRow = list[Document] | BadRow | None
Fields = dict[str, Any]
# What a person's own transforms and formats may raise on a row that they did not expect.
USER_CODE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RuntimeError,
    OSError,
)


# Rows do not know under which key of the config they stand, or in which part of a mix.
SKIP_HINT = "pass over such rows by `on_bad_row: skip` beside the `source` that names this file"


class DataConfig:
    """What a recipe's `data:` may be: the rows of one source, or a mix of several."""


@dataclass(frozen=True)
class DatasetConfig(DataConfig):
    """Rows of a file, a folder, a bundled data set or a Hub name, as documents of tokens.

    `max_length` is the maximum number of tokens per row: longer rows are truncated, without an EOS token. `packing`
    fills rows of `max_length` tokens with whole documents, without cross-document attention. `max_samples` uses the
    first rows only.
    """

    # Keys that say which rows there are and how they are served, but not what one of them becomes.
    loader_keys: ClassVar = frozenset(
        {
            "source",
            "split",
            "max_samples",
            "packing",
            "shuffle",
            "streaming",
            "num_proc",
            "on_bad_row",
            "max_bad_row_fraction",
        }
    )
    docs_per_row: ClassVar[int] = 1  # documents of a row that is not split
    has_document_ids: ClassVar[bool] = False  # whether a step asks which document a token is of

    source: str  # a file, a folder, tunekit/tools, a Hub name or an address
    split: str = "train"  # and the part of it: train[:90%]
    max_length: int = 2048  # Maximum tokens per row
    packing: bool = False  # Pack whole documents into rows of `max_length` tokens, without cross-document attention
    shuffle: bool = True
    max_samples: int | None = None  # Use only the first N rows
    excess_length_strategy: TooLong = "truncate"  # cut at the end, without an end token; drop; or go on in further rows
    on_bad_row: Literal["error", "skip"] = "error"  # Rows that cannot be parsed or have no target tokens
    max_bad_row_fraction: float = 0.01  # Stop if more rows than this are skipped
    transforms: tuple[RenameColumns | Filter, ...] = ()  # what is done to the columns first
    streaming: bool = False  # Read and tokenize rows during training
    num_proc: int | None = None  # Preprocessing processes; null: one per core

    def __post_init__(self) -> None:
        if not self.source:
            raise FieldError("source", "name a file, a folder or a data set")
        try:
            parse_split(self.split)
        except ValueError as error:
            raise FieldError("split", str(error)) from None
        if self.max_length < 2:
            raise FieldError("max_length", f"must be 2 or more tokens, not {self.max_length}")
        if self.max_samples is not None and self.max_samples < 1:
            raise FieldError("max_samples", f"must be 1 or more rows, not {self.max_samples}")
        if not 0 <= self.max_bad_row_fraction <= 1:
            raise FieldError(
                "max_bad_row_fraction", f"is a share of the rows, from 0 to 1, not {self.max_bad_row_fraction}"
            )
        if self.num_proc is not None and self.num_proc < 0:
            raise FieldError("num_proc", f"must be 0 or more processes, not {self.num_proc}")

    def check_source(self) -> None:
        """UserError if the source is not there or lacks the split, as far as can be told without reading it."""
        find_data_files(self.source, parse_split(self.split).name)

    def fingerprint_keys(self) -> dict[str, Any]:
        """The keys that decide what a row becomes, with their values."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: vars(self)[name] for name in names if name not in self.loader_keys}

    def resolve(self) -> "DatasetConfig":
        """What these rows are, where that is for the source to say."""
        return self

    def describe(self, fields: Fields) -> str:
        """What a row with these columns is, in words."""
        return f"{kind_name(type(self))}, as `kind` says"

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer that these rows want; UserError if they cannot be written with this one."""
        raise NotImplementedError

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        """What the columns of a row are as text, each text a document; UserError says why they are none."""
        raise NotImplementedError

    def encode_rows(self, tokenizer: Tokenizer, rows: Sequence[Row | BadRow]) -> list[EncodedRow]:
        """What each row becomes, in order.

        Documents; no document, if it was dropped as too long; a fault; or None, if a transform left it out.
        """
        read = [self.render_row(tokenizer, row) for row in rows]
        texts = [text for found in read if isinstance(found, list) for text in found]
        documents = iter(tokenize.tokenize_texts(tokenizer, texts))
        return [
            self.limit_row_length(row, found, [next(documents) for _ in found]) if isinstance(found, list) else found
            for row, found in zip(rows, read, strict=True)
        ]

    def render_row(self, tokenizer: Tokenizer, row: Row | BadRow) -> list[MaskedText] | BadRow | None:
        """The texts of a row."""
        if isinstance(row, BadRow):
            return row
        try:
            fields = self.transform(row.fields)
            return None if fields is None else self.render(tokenizer, fields)
        except UserError as error:
            return BadRow(row.where, str(error))
        except USER_CODE_ERRORS as error:
            said = blame(error, self, *self.transforms)
            if said is None:
                raise
            return BadRow(row.where, said)

    def transform(self, fields: Fields) -> Fields | None:
        """The columns behind all transforms; None if one of them leaves the row out."""
        found: Fields | None = fields
        for transform in self.transforms:
            found = None if found is None else transform(found)
        return found

    def limit_row_length(
        self, row: Row | BadRow, texts: list[MaskedText], whole: list[Document]
    ) -> list[Document] | BadRow:
        """Documents none of which is longer than `length`; if one is dropped, all of the row are."""
        try:
            parts = [self.limit_length(text, document) for text, document in zip(texts, whole, strict=True)]
        except UserError as error:
            return BadRow(row.where, str(error))
        return [document for part in parts for document in part] if all(parts) else []

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        """Text that flows goes on from its last token; what answers something, with as much before it as is learnt."""
        return fit_documents(
            document, self.max_length, self.excess_length_strategy, 1 if text.is_continuable else self.max_length // 2
        )


@dataclass(frozen=True)
class ChatTemplateMixin(DatasetConfig):
    """Rows that a chat template writes. `template` is the path of a Jinja file; None: the checkpoint's own."""

    # Jinja file, or the name of a bundled template, that replaces the checkpoint's chat template
    chat_template: str | None = None

    def check_source(self) -> None:
        super().check_source()
        if self.chat_template is not None and not Path(self.chat_template).expanduser().is_file():
            raise UserError(f"{self.chat_template}: no such chat template file")

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer = self.with_chat_template(tokenizer)
        tokenizer.template()
        return tokenizer

    def with_chat_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with the chat template that is named."""
        return tokenizer if self.chat_template is None else tokenizer.with_template(self.chat_template)


@dataclass(frozen=True)
class ConversationDataset(ChatTemplateMixin):
    """Rows that a chat template writes.

    `chat_template` is the path of a Jinja file; None: the checkpoint's own. `train_on` selects the target tokens: all
    assistant turns, the last one, everything, messages marked by the row (`train: true`, `weight: 1`), or the turns of
    a list of roles. The end-of-turn token of a turn is included.
    """

    train_on: TrainOn = "assistant"  # which turns, each with its end; a list names roles

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.train_on:
            raise FieldError("train_on", "name at least one role")

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        return [tokenize.render_conversation(tokenizer, self.to_conversation(fields), self.train_on)]

    def to_conversation(self, fields: Fields) -> Conversation:
        """The conversation that the columns of a row are."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChatDataset(ConversationDataset):
    """Conversations as OpenAI writes them: a column of messages, each with role and content.

    Schemas of tools stand in the column `tools`, if there: a list, or JSON in a string.
    """

    kind: ClassVar[str] = "chat"
    messages_column: str = "messages"  # the column

    def to_conversation(self, fields: Fields) -> Conversation:
        return make_conversation(
            get_column(fields, self.messages_column, "messages"), self.messages_column, fields.get("tools")
        )


@dataclass(frozen=True)
class ShareGPTDataset(ConversationDataset):
    """Conversations as ShareGPT writes them: a column of items, each with `from` and `value`.

    Who speaks is `human`, `gpt`, `system`, `function_call` (whose value is JSON) or `observation`. The columns `system`
    and `tools` are read, if there.
    """

    kind: ClassVar[str] = "sharegpt"
    conversations_column: str = "conversations"  # the column

    def to_conversation(self, fields: Fields) -> Conversation:
        found = get_column(fields, self.conversations_column, "conversations")
        return converters.from_sharegpt(found, self.conversations_column, fields.get("system"), fields.get("tools"))


@dataclass(frozen=True)
class InstructDataset(ConversationDataset):
    """An instruction, an input to it and the response to learn, in a column each: one user and one assistant message.

    An empty input is left out. Rows may lack the column `input`, but not one that was named otherwise. A column
    `history` holds pairs of earlier turns.
    """

    kind: ClassVar[str] = "instruct"
    prompt_column: str = "instruction"  # the column
    input_column: str | None = "input"  # the column
    response_column: str = "output"  # the column
    system_prompt: str | None = None  # what the system message says in rows without a column `system`

    def to_conversation(self, fields: Fields) -> Conversation:
        question = get_string(fields, self.prompt_column, "prompt")
        if self.input_column is not None and (self.input_column != "input" or fields.get("input") is not None):
            more = get_string(fields, self.input_column, "input")
            question = f"{question}\n\n{more}" if more else question
        answer = get_string(fields, self.response_column, "response")
        return converters.from_instruct(
            question, answer, fields.get("system") or self.system_prompt, fields.get("history")
        )


@dataclass(frozen=True)
class EosTokenMixin(DatasetConfig):
    """Rows that may be plain text, which ends with a token."""

    eos_token: str | None = None  # Token that ends a text; null: the tokenizer's EOS token

    def eos_token_id(self, tokenizer: Tokenizer) -> int:
        end = tokenizer.eos if self.eos_token is None else tokenizer.model.token_to_id(self.eos_token)
        if end is None:
            fault = "names no end-of-text token" if self.eos_token is None else f"has no token {self.eos_token!r}"
            raise UserError(f"the tokenizer {fault}; name one of its tokens as `end`")
        return end


@dataclass(frozen=True)
class TextOrChatMixin(EosTokenMixin, ConversationDataset):
    """Rows that are texts or conversations: whether a template and an end are needed, each row says."""

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        return self.with_chat_template(tokenizer)


@dataclass(frozen=True)
class CompletionDataset(TextOrChatMixin):
    """A prompt and the completion to learn, in a column each: texts, or lists of messages that the template writes."""

    kind: ClassVar[str] = "completion"
    prompt_column: str = "prompt"  # the column
    completion_column: str = "completion"  # the column

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        prompt = parse_json_cell(get_column(fields, self.prompt_column, "prompt"))
        completion = parse_json_cell(get_column(fields, self.completion_column, "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            start = 0 if self.train_on == "all" else len(prompt)
            return [tokenize.render_plain_text(prompt + completion, self.eos_token_id(tokenizer), start)]
        found = converters.join_prompt(
            prompt, completion, fields.get("tools"), (self.prompt_column, self.completion_column)
        )
        return [tokenize.render_conversation(tokenizer, found, self.train_on)]


@dataclass(frozen=True)
class TextDataset(EosTokenMixin):
    """Plain text, all of it learnt: one longer than `max_length` goes on in further rows."""

    kind: ClassVar[str] = "text"
    excess_length_strategy: TooLong = "split"  # go on in further rows; drop; or cut at the end
    text_column: str = "text"  # the column

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        self.eos_token_id(tokenizer)
        return tokenizer

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        return [
            tokenize.render_plain_text(get_string(fields, self.text_column, "column"), self.eos_token_id(tokenizer))
        ]


@dataclass(frozen=True)
class DetectedDataset(TextOrChatMixin):
    """Rows that are recognised by their columns."""

    open: ClassVar = True  # a kind that is named in its place keeps what is said here
    candidates: ClassVar[tuple[type[DatasetConfig], ...]]  # that are told apart
    expected_columns: ClassVar[str]  # what is to be done with others
    rules: ClassVar[tuple[FormatRule, ...]] = ()  # what is asked before all else

    @cached_property
    def detected(self) -> dict[RowFormat, DatasetConfig]:
        """The kinds that rows were recognised as, each with what is said here."""
        return {}

    def detect(self, fields: Fields) -> DatasetConfig:
        """The kind that a row is."""
        form = detect_format(fields, self.rules)
        if form not in self.detected:
            self.detected[form] = self.make_config(form)
        return self.detected[form]

    def make_config(self, form: RowFormat) -> DatasetConfig:
        cls = next((cls for cls in self.candidates if kind_name(cls) == form.kind), None)
        if cls is None:
            raise UserError(
                f"these are {form.description}, from which this recipe does not learn: {self.expected_columns}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {name: value for name, value in vars(self).items() if name in known}
        return cls(**given, **dict[str, Any](form.columns))

    def describe(self, fields: Fields) -> str:
        return detect_format(fields, self.rules).description

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        return self.detect(fields).render(tokenizer, fields)


@dataclass(frozen=True)
class AutoDataset(DetectedDataset):
    """Rows that are recognised by their columns. This is meant where no `kind` is written.

    The first that fits is taken: `messages` or `conversations` (as OpenAI or ShareGPT writes them), `prompt` and
    `completion`, `instruction` and `output`, `text`. A text goes on in further rows, unless it is dropped.
    """

    kind: ClassVar[str] = "auto"
    usual: ClassVar = True
    candidates: ClassVar = (ChatDataset, ShareGPTDataset, InstructDataset, CompletionDataset, TextDataset)
    expected_columns: ClassVar = (
        "name a `kind` that it reads, or take the recipe `preference`, which learns from answers that are compared"
    )

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        if text.is_continuable and self.excess_length_strategy == "truncate":
            return fit_documents(document, self.max_length, "split", 1)
        return super().limit_length(text, document)


SFTDataset = (
    AutoDataset | ChatDataset | ShareGPTDataset | InstructDataset | CompletionDataset | TextDataset
)  # what a recipe that learns from rows may read


@dataclass(frozen=True)
class PreferenceBase(TextOrChatMixin):
    """Rows whose completions are compared or judged: nothing of a prompt is learnt, and nothing goes on elsewhere."""

    has_document_ids: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.excess_length_strategy == "split":
            raise FieldError(
                "excess_length_strategy", "a completion that is compared cannot go on in further rows: truncate or drop"
            )
        if self.train_on == "all":
            raise FieldError("train_on", "a prompt is given to the model, and not learnt from what is preferred")


@dataclass(frozen=True)
class PreferenceDataset(PreferenceBase):
    """Pairs of answers, of which one is preferred: texts, or conversations. The chosen document comes first.

    What both begin with is their prompt, and a column `prompt` stands before both, if they do not begin with it.
    `max_length` limits each answer with its prompt, and a packed row has room for both. Losses on unpaired answers take
    the chosen answer as desirable and the rejected one as undesirable.
    """

    kind: ClassVar[str] = "preference"
    docs_per_row: ClassVar = 2

    prompt_column: str = "prompt"  # the column
    chosen_column: str = "chosen"  # the column
    rejected_column: str = "rejected"  # the column
    margin_column: str = (
        "margin"  # the column, which rows may lack: by how much the chosen answer is to be the better one
    )

    def describe(self, fields: Fields) -> str:
        return f"preference pairs (columns {self.chosen_column!r}, {self.rejected_column!r})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        chosen, rejected = (
            get_answer(fields, self.chosen_column, "chosen"),
            get_answer(fields, self.rejected_column, "rejected"),
        )
        prompt = parse_json_cell(fields.get(self.prompt_column))
        if chosen == rejected:
            raise UserError(f"{self.chosen_column} and {self.rejected_column} are the same: nothing is preferred")
        if all(isinstance(side, str) for side in (chosen, rejected)) and isinstance(prompt, str | None):
            head = converters.common_prefix(chosen, rejected) if prompt is None else prompt
            begun = all(side.startswith(head) for side in (chosen, rejected))
            sides = (side if begun else head + side for side in (chosen, rejected))
            texts = [tokenize.render_plain_text(side, self.eos_token_id(tokenizer), len(head)) for side in sides]
        else:
            talks = converters.split_preference(chosen, rejected, prompt, fields.get("tools"))
            texts = [tokenize.render_conversation(tokenizer, found, self.train_on) for found in talks]
        good, bad = texts
        values = (
            ()
            if fields.get(self.margin_column) is None
            else (to_number(fields[self.margin_column], self.margin_column),)
        )
        return [
            good._replace(signs=good.doc_flags | DocFlags.DESIRABLE, values=values),
            bad._replace(signs=bad.doc_flags | DocFlags.UNDESIRABLE),
        ]


@dataclass(frozen=True)
class UnpairedPreferenceDataset(PreferenceBase, CompletionDataset):
    """A prompt, a completion and whether it is a good one, for KTO. The document's signs say which."""

    kind: ClassVar[str] = "unpaired_preference"
    label_column: str = "label"  # the column: true or false

    def describe(self, fields: Fields) -> str:
        return (
            f"completions with marks (columns {self.prompt_column!r}, {self.completion_column!r}, "
            f"{self.label_column!r})"
        )

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        good = get_column(fields, self.label_column, "label")
        if not isinstance(good, bool):
            raise UserError(f"{self.label_column}: want true or false, this is {json_type(good)}")
        (text,) = super().render(tokenizer, fields)
        return [text._replace(signs=text.doc_flags | (DocFlags.DESIRABLE if good else DocFlags.UNDESIRABLE))]


def get_answer(fields: Fields, name: str, option: str) -> Any:
    """A side of a pair; UserError if nothing stands there at all."""
    found = parse_json_cell(get_column(fields, name, option))
    if found is None or found == []:
        told = "null" if found is None else "an empty list"
        raise UserError(f"{name}: is {told}, and a pair is two answers: write it, or {SKIP_HINT}")
    return found


def to_number(value: Any, name: str) -> float:
    """What a column says in numbers; true is 1 and false 0."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(
            f"{name}: want a number, this is {repr(value) if isinstance(value, float) else json_type(value)}"
        )
    return float(value)
