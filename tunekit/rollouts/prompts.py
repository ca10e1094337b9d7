"""Prompts of recipe `generate`: texts of the config, and rows of a dataset."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.data.prompts import Prompt
from tunekit.data.readers.row_reader import Row, require_row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.generation.generate import check_prompt_length
from tunekit.rollouts.rollout import PromptRow

LocatedPrompt = tuple[str, Prompt]  # file and row of a prompt, and the prompt


def read_prompts(data: PromptDataset, texts: Sequence[str], has_rows: bool = True) -> Iterator[LocatedPrompt]:
    """The texts, and then the rows of `data` if it has some. Raise UserError, with the row, if there is no prompt."""
    rows = chain(
        (Row(f"prompts.{index}", {"prompt": text}) for index, text in enumerate(texts)),
        map(require_row, data.open_rows().rows if has_rows else ()),
    )
    for row in rows:
        try:
            yield row.where, data.read_prompt(row.fields)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None


def encode_prompts(data: PromptDataset, prompts: Iterable[LocatedPrompt], tokenizer: Tokenizer) -> list[PromptRow]:
    """Prompts with their tokens. Raise UserError, with the row, if the chat template fails."""
    rows = []
    for where, prompt in prompts:
        try:
            tokens = data.encode_prompt(tokenizer, prompt)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        rows.append(make_prompt_row(where, prompt, tokens, data.is_plain_text(tokenizer, prompt)))
    return rows


def make_prompt_row(where: str, prompt: Prompt, tokens: Sequence[int], is_text: bool) -> PromptRow:
    return PromptRow(where, prompt.conversation.messages, tokens, prompt.columns, prompt.conversation.tools, is_text)


def check_prompt_lengths(rows: Iterable[PromptRow], context: int) -> None:
    """Raise UserError with the row if a prompt leaves no space for an answer within the context length."""
    for row in rows:
        check_prompt_length(row.where, len(row.tokens), context)
