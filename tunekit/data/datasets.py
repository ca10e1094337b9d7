"""Dataset configs: what the rows of a dataset are, and which of their tokens are target tokens."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tunekit.config.choices import kind_name
from tunekit.data import tokenize
from tunekit.data.cell_values import get_answer, to_number
from tunekit.data.chat_template import converters
from tunekit.data.chat_template.chat_format import with_chat_format
from tunekit.data.chat_template.messages import (
    Conversation,
    get_column,
    get_optional_column,
    get_string,
    json_type,
    make_conversation,
    messages_to_answer,
    parse_json_cell,
)
from tunekit.data.chat_template.template import TemplateKwargs, check_template_kwargs, find_template
from tunekit.data.column_roles import Columns, column_roles, complete_columns
from tunekit.data.column_templates import Transform
from tunekit.data.column_usage import ColumnUsage
from tunekit.data.document import UNEQUAL_WEIGHTS, DocFlags, Document
from tunekit.data.preference_prompts import find_prompt_column, read_prompt_messages, starts_with_prompt
from tunekit.data.readers.open_dataset import find_data_files, open_dataset, parse_split
from tunekit.data.readers.row_reader import BadRow, Row, RowReader
from tunekit.data.row_errors import USER_CODE_ERRORS, format_row_error
from tunekit.data.tokenize import MaskedText, TrainOn
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Fields, RowFields
from tunekit.data.truncation import TooLong, fit_documents
from tunekit.errors import FieldError, UserError

EncodedRow = list[Document] | BadRow | None


class DataConfig:
    """Data of a recipe: the rows of one dataset, or a mixture of several. The common base of their kinds."""

    keeps_shared_keys: ClassVar[bool] = True  # another kind of rows keeps the source


@dataclass(frozen=True)
class DatasetConfig(DataConfig):
    """Rows of a file, a directory, a bundled dataset, or a Hub dataset, as tokenized documents.

    `max_length` is the maximum number of tokens per row: longer rows are truncated, without an EOS token. `packing`
    fills rows of `max_length` tokens with whole documents, without cross-document attention. `max_samples` uses the
    first rows only.
    """

    # Keys that do not change the documents of a row.
    loader_keys: ClassVar[frozenset[str]] = frozenset(
        {"source", "split", "max_samples", "packing", "shuffle", "streaming", "num_proc", "on_bad_row",
         "max_bad_row_fraction"}
    )  # fmt: skip
    has_document_ids: ClassVar[bool] = False  # whether losses need the document of each token
    nullable_roles: ClassVar[frozenset[str]] = frozenset()  # roles of columns that may be null
    has_targets: ClassVar[bool] = True  # False: prompts, whose answers are sampled in training

    source: str  # File, directory, bundled dataset (tunekit/tools), Hub name, or URL
    split: str = "train"  # Split, optionally with a slice: train[:90%]
    max_length: int = 2048  # Maximum tokens per row
    packing: bool = False  # Pack whole documents into rows of `max_length` tokens, without cross-document attention
    shuffle: bool = True  # Shuffle the rows in each epoch
    max_samples: int | None = None  # Use only the first N rows
    excess_length_strategy: TooLong = "truncate"  # `truncate` (without an EOS token), `drop`, or `split` into rows
    on_bad_row: Literal["error", "skip"] = "error"  # Rows that cannot be parsed or have no target tokens
    max_bad_row_fraction: float = 0.01  # Stop if more rows than this are skipped
    transforms: tuple[Transform, ...] = ()  # Change or filter rows before their format is read
    streaming: bool = False  # Read and tokenize rows during training
    num_proc: int | None = None  # Preprocessing processes; null: one per core
    columns: Columns = column_roles()  # Columns by their role, which the `kind` of the rows defines

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", complete_columns(type(self), self.columns, self.nullable_roles))
        if not self.source or not isinstance(self.source, str):
            raise FieldError("source", f"must be a file, a directory, or a dataset name, got {str(self.source)[:80]!r}")
        try:
            parse_split(self.split)
        except ValueError as error:
            raise FieldError("split", str(error)) from None
        if self.max_length < 2:
            raise FieldError("max_length", f"must be >= 2, got {self.max_length}")
        if self.max_samples is not None and self.max_samples < 1:
            raise FieldError("max_samples", f"must be >= 1, got {self.max_samples}")
        if not 0 <= self.max_bad_row_fraction <= 1:
            raise FieldError("max_bad_row_fraction", f"must be from 0 to 1, got {self.max_bad_row_fraction}")
        if self.num_proc is not None and self.num_proc < 0:
            raise FieldError("num_proc", f"must be >= 0, got {self.num_proc}")

    @property
    def docs_per_row(self) -> int:
        """Documents of a row that is not split."""
        return 1

    def column(self, role: str) -> str:
        """Name of the column with a role."""
        name = self.columns[role]
        assert name is not None, "a role whose column is not known yet"
        return name

    def check_source(self) -> None:
        """Raise UserError if the source or its split does not exist. Reads no rows."""
        find_data_files(self.source, self.split)

    def open_rows(self) -> RowReader:
        """Rows of the source before any transform. They are not counted with `streaming`."""
        return open_dataset(self.source, self.split, self.max_samples, self.streaming)

    def fingerprint_keys(self) -> dict[str, Any]:
        """Keys that change the documents of a row, with their values."""
        names = (item.name for item in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name not in self.loader_keys}

    def resolve(self) -> "DatasetConfig":
        """Config of the format that the rows have; for `auto` datasets that must know it before training."""
        return self

    def describe(self, fields: Fields) -> str:
        """Description of the format of a row."""
        return f"{kind_name(type(self))}, set by `kind`"

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Tokenizer for these rows. Raise UserError if it cannot encode them."""
        return tokenizer

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        """Texts of a row, one for each document. Raise UserError for an invalid row."""
        raise NotImplementedError

    def prompt_conversation(self, fields: Fields) -> Conversation | None:
        """Conversation up to the answer at the end of the targets of a valid row; None if there is no such answer."""
        return None

    def encode_rows(
        self, tokenizer: Tokenizer, rows: Iterable[Row | BadRow], usage: ColumnUsage | None = None
    ) -> list[EncodedRow]:
        """Result of each row: documents, [] if dropped as too long, a BadRow, or None if a transform removes it.

        The columns of valid rows are added to `usage`.
        """
        rendered = [(row, self.render_row(tokenizer, row, usage)) for row in rows]
        texts = [text for _, result in rendered if isinstance(result, list) for text in result]
        documents = iter(tokenize.tokenize_texts(tokenizer, texts))
        return [
            self.limit_row_length(row, result, [next(documents) for _ in result])
            if isinstance(result, list)
            else result
            for row, result in rendered
        ]

    def render_row(
        self, tokenizer: Tokenizer, row: Row | BadRow, usage: ColumnUsage | None = None
    ) -> list[MaskedText] | BadRow | None:
        """Texts of a row after its transforms; None if a transform removes it."""
        if isinstance(row, BadRow):
            return row
        try:
            fields = self.apply_transforms(row.fields)
            texts = None if fields is None else self.render(tokenizer, fields)
        except (UserError, *USER_CODE_ERRORS) as error:
            return BadRow(row.where, format_row_error(error, row.fields, self, *self.transforms))
        if usage is not None and fields is not None and texts is not None:
            usage.add(row.where, fields, lambda: tokenize.seen_text(tokenizer, texts))
        return texts

    def apply_transforms(self, fields: Fields) -> RowFields | None:
        """Columns after all transforms, which record what is read; None if a transform removes the row."""
        result = RowFields(fields)
        for transform in self.transforms:
            changed = transform(result)
            if changed is None:
                return None
            result = RowFields(changed, result.reads)
        return result

    def limit_row_length(
        self, row: Row | BadRow, texts: list[MaskedText], documents: list[Document]
    ) -> list[Document] | BadRow:
        """Documents of at most `max_length` tokens. If one of them is dropped, all documents of the row are."""
        try:
            limited = [self.limit_length(text, document) for text, document in zip(texts, documents, strict=True)]
        except UserError as error:
            return BadRow(row.where, str(error))
        return [document for windows in limited for document in windows] if all(limited) else []

    def limit_length(self, text: MaskedText, document: Document) -> list[Document]:
        """Truncate, drop, or split a document. Windows of plain text overlap by one token, others by half."""
        context = 1 if text.is_continuable else self.max_length // 2
        return fit_documents(document, self.max_length, self.excess_length_strategy, context)


@dataclass(frozen=True)
class ChatTemplateMixin(DatasetConfig):
    """Rows that a chat template renders."""

    # Jinja file, or the name of a bundled template, that replaces the checkpoint's chat template
    chat_template: str | None = None
    # Values of template variables, such as {enable_thinking: false}
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template_kwargs(self.chat_template_kwargs)

    def check_source(self) -> None:
        super().check_source()
        if self.chat_template is not None:
            find_template(self.chat_template)

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        return with_chat_format(tokenizer, self.chat_template, self.chat_template_kwargs)


@dataclass(frozen=True)
class ConversationDataset(ChatTemplateMixin):
    """Conversations that a chat template renders.

    `train_on` selects the target tokens: all assistant turns, the last one, everything, messages with a flag
    (`train: true`, `weight: 1`), or the turns of a list of roles. The end-of-turn token of a turn is included.
    """

    train_on: TrainOn = "assistant"  # Messages that are target tokens, each with its end-of-turn token; a list: roles

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.train_on:
            raise FieldError("train_on", "must name at least one role")

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer = super().prepare_tokenizer(tokenizer)
        tokenizer.template()
        return tokenizer

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        return [tokenize.render_conversation(tokenizer, self.to_conversation(fields), self.train_on)]

    def prompt_conversation(self, fields: Fields) -> Conversation | None:
        conversation = self.to_conversation(fields)
        last = tokenize.target_turns(conversation, self.train_on)[-1]
        is_answer = conversation.messages[last]["role"] == "assistant"
        messages = messages_to_answer(conversation.messages[:last]) if is_answer else []
        return conversation._replace(messages=messages) if messages else None

    def to_conversation(self, fields: Fields) -> Conversation:
        """Conversation of a row."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChatDataset(ConversationDataset):
    """Conversations in OpenAI's format: a list of messages with role and content.

    Optional columns: `system`, and `tools`, which has tool schemas: a list, or a JSON string.
    """

    kind: ClassVar[str] = "chat"
    columns: Columns = column_roles(messages="messages")  # Column of the `messages`

    def to_conversation(self, fields: Fields) -> Conversation:
        messages = get_column(fields, self.columns, "messages")
        conversation = make_conversation(messages, self.column("messages"), fields.get("tools"))
        return converters.with_system(conversation, converters.get_system(fields), self.column("messages"))


@dataclass(frozen=True)
class ShareGPTDataset(ConversationDataset):
    """Conversations in ShareGPT's format: a list of items with `from` and `value`.

    `from` is `human`, `gpt`, `system`, `function_call` (with JSON as its value), or `observation`. Optional columns:
    `system`, `tools`.
    """

    kind: ClassVar[str] = "sharegpt"
    columns: Columns = column_roles(conversations="conversations")  # Column of the items

    def to_conversation(self, fields: Fields) -> Conversation:
        items = get_column(fields, self.columns, "conversations")
        system, tools = converters.get_system(fields), fields.get("tools")
        return converters.from_sharegpt(items, self.column("conversations"), system, tools)


@dataclass(frozen=True)
class InstructDataset(ConversationDataset):
    """Instructions in Alpaca's format: an instruction, an optional input, and the response, each in a column.

    An empty input is left out. Rows may lack the default column `input`. An optional column `history` has pairs of
    earlier turns.
    """

    kind: ClassVar[str] = "instruct"
    nullable_roles: ClassVar[frozenset[str]] = frozenset({"input"})
    # Columns of the instruction (`prompt`), its `input` (null: none), and the response (`completion`)
    columns: Columns = column_roles(prompt="instruction", input="input", completion="output")
    system_prompt: str | None = None  # System message of rows without a column `system`

    def to_conversation(self, fields: Fields) -> Conversation:
        prompt = get_string(fields, self.columns, "prompt")
        column = self.columns["input"]
        if column is not None and (column != "input" or fields.get("input") is not None):
            input_text = get_string(fields, self.columns, "input")
            prompt = f"{prompt}\n\n{input_text}" if input_text else prompt
        response = get_string(fields, self.columns, "completion")
        system = converters.get_system(fields) or self.system_prompt
        return converters.from_instruct(prompt, response, system, fields.get("history"))


@dataclass(frozen=True)
class EosTokenMixin(DatasetConfig):
    """Rows that may be plain text, which ends with an EOS token."""

    eos_token: str | None = None  # Token that ends a text; null: the tokenizer's EOS token

    def eos_token_id(self, tokenizer: Tokenizer) -> int:
        """Id of the EOS token. Raise UserError if the tokenizer does not have it."""
        token_id = tokenizer.eos if self.eos_token is None else tokenizer.model.token_to_id(self.eos_token)
        if token_id is None:
            problem = "has no EOS token" if self.eos_token is None else f"has no token {self.eos_token!r}"
            raise UserError(f"the tokenizer {problem}. Set `eos_token` to one of its tokens")
        return token_id


@dataclass(frozen=True)
class TextOrChatMixin(EosTokenMixin, ConversationDataset):
    """Rows that are texts or conversations: only some need a chat template or an EOS token."""

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        return ChatTemplateMixin.prepare_tokenizer(self, tokenizer)


@dataclass(frozen=True)
class CompletionDataset(TextOrChatMixin):
    """A prompt and a completion, each in a column: texts, or lists of messages. The completion is trained on."""

    kind: ClassVar[str] = "completion"
    # Columns of the `prompt` and of the `completion`
    columns: Columns = column_roles(prompt="prompt", completion="completion")

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        prompt, completion = self.get_parts(fields)
        if isinstance(prompt, str) and isinstance(completion, str):
            start = 0 if self.train_on == "all" else len(prompt)
            return [tokenize.render_plain_text(prompt + completion, self.eos_token_id(tokenizer), start)]
        return super().render(tokenizer, fields)

    def get_parts(self, fields: Fields) -> tuple[Any, Any]:
        """The prompt and the completion."""
        prompt = parse_json_cell(get_column(fields, self.columns, "prompt"))
        return prompt, parse_json_cell(get_column(fields, self.columns, "completion"))

    def prompt_conversation(self, fields: Fields) -> Conversation | None:
        return (
            None
            if all(isinstance(part, str) for part in self.get_parts(fields))
            else super().prompt_conversation(fields)
        )

    def to_conversation(self, fields: Fields) -> Conversation:
        columns, system = (self.column("prompt"), self.column("completion")), converters.get_system(fields)
        return converters.join_prompt(*self.get_parts(fields), fields.get("tools"), columns, system)


@dataclass(frozen=True)
class TextDataset(EosTokenMixin):
    """Plain text. All tokens are target tokens. Texts longer than `max_length` are split into several rows."""

    kind: ClassVar[str] = "text"
    excess_length_strategy: TooLong = "split"  # `split` into several rows, `drop`, or `truncate`
    columns: Columns = column_roles(text="text")  # Column of the `text`

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        self.eos_token_id(tokenizer)
        return tokenizer

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        text = get_string(fields, self.columns, "text")
        return [tokenize.render_plain_text(text, self.eos_token_id(tokenizer))]


@dataclass(frozen=True)
class UnsplitRowsBase(DatasetConfig):
    """Rows that are compared or labeled as a whole, and cannot be split."""

    has_document_ids: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.excess_length_strategy == "split":
            problem = "rows with labels or pairs cannot be split, got 'split'. Set 'truncate' or 'drop'"
            raise FieldError("excess_length_strategy", problem)


@dataclass(frozen=True)
class PreferenceBase(UnsplitRowsBase, TextOrChatMixin):
    """Rows of completions that are compared or labeled: prompts are never trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_on == "all":
            raise FieldError("train_on", "preference data cannot train on prompts, got 'all'")


@dataclass(frozen=True)
class PreferenceDataset(PreferenceBase):
    """Pairs of a chosen and a rejected answer: texts, or conversations. The chosen document comes first.

    The prompt is the common prefix of both. A column `prompt` is added to answers that do not start with it; without
    one, the column `messages` or `conversations`.
    `max_length` limits each answer with its prompt; a packed row has room for both. Losses on unpaired answers use the
    chosen answer as desirable and the rejected one as undesirable.
    """

    kind: ClassVar[str] = "preference"
    # Columns of the `prompt`, the preferred answer (`chosen`), the other one (`rejected`), and the target reward
    # `margin`. Rows may lack the columns of `prompt` and `margin` if these have their defaults
    columns: Columns = column_roles(prompt="prompt", chosen="chosen", rejected="rejected", margin="margin")

    @property
    def docs_per_row(self) -> int:
        return 2

    def describe(self, fields: Fields) -> str:
        answers = [parse_json_cell(fields.get(name)) for name in (self.column("chosen"), self.column("rejected"))]
        prompt, _ = self.find_prompt(fields, answers)
        columns = ", ".join(map(repr, filter(None, (prompt, self.column("chosen"), self.column("rejected")))))
        return f"preference pairs (columns {columns})"

    def find_prompt(self, fields: Fields, answers: list[Any]) -> tuple[str | None, Any]:
        """Column and value of the prompt, a text or a list of messages; (None, None) without one."""
        values = dict(fields)  # a column that is not used does not count as read
        prompt = parse_json_cell(get_optional_column(values, self.columns, "prompt"))
        if isinstance(prompt, str) and all(map(starts_with_prompt, answers)):
            return None, None
        if prompt is None and self.column("prompt") == "prompt":
            column = find_prompt_column(values, answers)
            return column, None if column is None else read_prompt_messages(fields[column], column, answers)
        return self.column("prompt"), parse_json_cell(fields.get(self.column("prompt")))

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        chosen = get_answer(fields, self.columns, "chosen")
        rejected = get_answer(fields, self.columns, "rejected")
        _, prompt = self.find_prompt(fields, [chosen, rejected])
        if chosen == rejected:
            raise UserError(f"{self.columns['chosen']} and {self.columns['rejected']} must differ")
        if all(isinstance(answer, str) for answer in (chosen, rejected)) and isinstance(prompt, str | None):
            prefix = converters.common_prefix(chosen, rejected) if prompt is None else prompt
            has_prefix = all(answer.startswith(prefix) for answer in (chosen, rejected))
            contents = (answer if has_prefix else prefix + answer for answer in (chosen, rejected))
            eos_id = self.eos_token_id(tokenizer)
            texts = [tokenize.render_plain_text(content, eos_id, len(prefix)) for content in contents]
        else:
            tools, system = fields.get("tools"), converters.get_system(fields)
            conversations = converters.split_preference(chosen, rejected, prompt, tools, system)
            texts = [tokenize.render_conversation(tokenizer, item, self.train_on) for item in conversations]
        if any(text.doc_flags & DocFlags.WEIGHTED for text in texts):
            raise UserError(UNEQUAL_WEIGHTS)
        margin = get_optional_column(fields, self.columns, "margin")
        values = () if margin is None else (to_number(margin, self.column("margin")),)
        desirable, undesirable = texts
        return [
            desirable._replace(doc_flags=desirable.doc_flags | DocFlags.DESIRABLE, values=values),
            undesirable._replace(doc_flags=undesirable.doc_flags | DocFlags.UNDESIRABLE),
        ]


@dataclass(frozen=True)
class UnpairedPreferenceDataset(PreferenceBase, CompletionDataset):
    """A prompt, a completion, and whether the completion is desirable, as in KTO."""

    kind: ClassVar[str] = "unpaired_preference"
    # Columns of the `prompt`, the `completion`, and its `label`: true or false
    columns: Columns = column_roles(prompt="prompt", completion="completion", label="label")

    def describe(self, fields: Fields) -> str:
        columns = self.column("prompt"), self.column("completion"), self.column("label")
        return f"unpaired preferences (columns {', '.join(map(repr, columns))})"

    def render(self, tokenizer: Tokenizer, fields: Fields) -> list[MaskedText]:
        label = get_column(fields, self.columns, "label")
        if not isinstance(label, bool):
            raise UserError(f"{self.columns['label']}: must be true or false, got {json_type(label)}")
        (text,) = super().render(tokenizer, fields)
        return [text._replace(doc_flags=text.doc_flags | (DocFlags.DESIRABLE if label else DocFlags.UNDESIRABLE))]
