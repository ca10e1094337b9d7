"""Prompts of recipe `generate`: texts of the config, and rows of a dataset."""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.converters import add_system, get_system
from tunekit.data.chat_template.messages import Message, make_conversation, parse_tools
from tunekit.data.check_target import ColumnReaders
from tunekit.data.column_checks import column_findings
from tunekit.data.column_usage import ColumnUsage
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import require_row
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import RowFields
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.generate import check_prompt_length
from tunekit.rollouts.rollout import PromptRow


class Prompt(NamedTuple):
    """A prompt as text, or as a list of messages, with its tools, the columns of its row, and their system message."""

    where: str
    value: str | list[Message]
    tools: list[dict[str, Any]] | None
    columns: Mapping[str, Any]
    system: Any = None

    def to_row(self, tokenizer: Tokenizer, system_prompt: str | None, apply_chat_template: bool) -> PromptRow:
        """The row to answer, up to the start of the answer. Without a chat template, texts are continued."""
        messages = [{"role": "user", "content": self.value}] if isinstance(self.value, str) else self.value
        if messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        is_text = isinstance(self.value, str) and not apply_chat_template
        if is_text and (self.system or self.tools):
            name = "system" if self.system else "tools"
            raise UserError(f"{self.where}: {name}: a text to continue has none. Set apply_chat_template=true.")
        try:
            messages = add_system(list(messages), self.system, "messages")
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from None
        if system_prompt and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system_prompt}, *messages]
        if isinstance(self.value, str) and is_text:
            tokens = tokenizer.encode(self.value, special=True)
            return PromptRow(self.where, messages, tokens, self.columns, self.tools, is_text=True)
        tokens = encode_conversation(tokenizer, messages, self.tools)
        return PromptRow(self.where, messages, tokens, self.columns, self.tools)


def read_prompts(
    texts: Sequence[str], source: str | None, split: str, usage: ColumnUsage | None = None
) -> Iterator[Prompt]:
    """The prompts of the config, then those of the source, whose columns are added to `usage`."""
    yield from (Prompt(f"prompts.{index}", text, None, {}) for index, text in enumerate(texts))
    for row in map(require_row, open_dataset(source, split, None).rows) if source is not None else ():
        fields = RowFields(row.fields)
        try:
            value = parse_prompt(fields)
            tools, system = parse_tools(fields.get("tools"), "tools"), get_system(fields)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
        if usage is not None:
            usage.add(row.where, fields, lambda: "")
        yield Prompt(row.where, value, tools, {**expected_answer(value), **row.fields}, system)


def parse_prompt(fields: Mapping[str, Any]) -> str | list[Message]:
    """The text or the messages of a row. Raises UserError with the column if there are none."""
    column = next((name for name in ("messages", "prompt") if fields.get(name) is not None), None)
    if column is None:
        raise UserError("has no 'messages' or 'prompt'")
    value = fields[column]
    if not isinstance(value, str | list):
        raise UserError(f"{column}: must be text or a list of messages, got {reprlib.repr(value)}")
    if not value:
        raise UserError(f"{column}: is empty")
    return value if isinstance(value, str) else make_conversation(value, column).messages


def open_prompts(
    texts: Sequence[str], source: str | None, split: str, readers: ColumnReaders, dist: DistributedContext
) -> list[Prompt]:
    """All prompts. Log the columns that neither they nor the rewards and the environment, the `readers`, use."""
    usage = ColumnUsage()
    prompts = [*read_prompts(texts, source, split, usage)]
    for finding in column_findings("source", usage.reports, len(prompts), readers):
        dist.log(f"{finding.severity}: source: {finding.message} ({', '.join(finding.row_locations)}).")
    return prompts


def check_prompt_lengths(rows: Iterable[PromptRow], context: int) -> None:
    """Raise UserError with the row if a prompt leaves no space for an answer within the context length."""
    for row in rows:
        check_prompt_length(row.where, len(row.tokens), context)


def expected_answer(prompt: str | list[Message]) -> Mapping[str, Any]:
    """The answer at the end of a conversation as a column for rewards; empty without one."""
    if isinstance(prompt, str) or prompt[-1].get("role") != "assistant":
        return {}
    return {"answer": prompt[-1].get("content")}
