"""Prompts of rows: texts, or conversations up to the answer. The one reader of all recipes that sample answers."""

from typing import NamedTuple

from tunekit.data.chat_template.converters import get_system, to_system_messages
from tunekit.data.chat_template.messages import (
    Conversation,
    Message,
    get_column,
    json_type,
    messages_to_answer,
    parse_json_cell,
    parse_tools,
)
from tunekit.data.datasets import ChatDataset, InstructDataset, ShareGPTDataset
from tunekit.data.format_detection import INSTRUCT, MESSAGE_COLUMNS, SPEAKER_KEYS, is_sharegpt, match_rule
from tunekit.data.transforms import Fields, replace_column
from tunekit.errors import UserError

PROMPT = "prompt"  # column of prompts; rows without it have a conversation


class Prompt(NamedTuple):
    """A row to answer.

    `messages` end with the message to answer. `text` is the only message of the user, if the row has a text. `columns`
    are those of the row, and `answer`: the text of the answer at the end of its conversation, for rewards.
    """

    conversation: Conversation
    text: str | None
    columns: Fields

    @property
    def value(self) -> str | list[Message]:
        """The text, or the messages."""
        return self.conversation.messages if self.text is None else self.text


def read_prompt(fields: Fields, column: str = PROMPT, system_prompt: str | None = None) -> Prompt:
    """The prompt of a row: its column `prompt`, or the conversation of a row for supervised fine-tuning.

    Answers at the end of a conversation are left out. Another `column` than the default must exist. `system_prompt` is
    for prompts without a system message. Raise UserError if nothing is left to answer.
    """
    conversation, text = read_conversation(fields, find_column(fields) if column == PROMPT else column)
    messages, last = messages_to_answer(conversation.messages), conversation.messages[-1]
    if not messages:
        raise UserError(f"{conversation.column}: has no message to answer. The last one must be of role user or tool")
    if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    has_answer = last["role"] == "assistant" and last.get("content") is not None
    columns = fields if fields.get("answer") is not None or not has_answer else {**fields, "answer": last["content"]}
    return Prompt(conversation._replace(messages=messages), text, columns)


def find_column(fields: Fields) -> str | None:
    """Column of the prompt or of the messages; None for instructions. Raise UserError without any of them."""
    column = next((name for name in (PROMPT, *MESSAGE_COLUMNS) if fields.get(name) is not None), None)
    if column is None and match_rule(fields, (INSTRUCT,)) is None:
        columns = ", ".join(map(str, fields)) or "none"
        raise UserError(f"the row has no column 'prompt' or 'messages' (columns: {columns}). Rename one")
    return column


def read_conversation(fields: Fields, column: str | None) -> tuple[Conversation, str | None]:
    """Messages of a row, and its text if it has no list of messages."""
    if column is None:
        return InstructDataset("row").to_conversation({**fields})._replace(column="instruction"), None
    value = parse_json_cell(get_column(fields, {"prompt": column}, "prompt"), SPEAKER_KEYS)
    if isinstance(value, list):
        row = replace_column(fields, column, value)
        if is_sharegpt(value):
            return ShareGPTDataset("row", columns={"conversations": column}).to_conversation(row), None
        return ChatDataset("row", columns={"messages": column}).to_conversation(row), None
    if not isinstance(value, str):
        raise UserError(f"{column}: expected a text or a list of messages, got {json_type(value)}")
    if not value:
        raise UserError(f"{column}: is empty")
    messages = [*to_system_messages(get_system(fields)), {"role": "user", "content": value}]
    return Conversation(messages, parse_tools(fields.get("tools"), "tools"), column=column), value
