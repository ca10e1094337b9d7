"""Prompts of recipe `generate`: texts of the config, and rows of a dataset."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Protocol

from tunekit.data.check_target import ColumnReaders
from tunekit.data.column_checks import column_findings
from tunekit.data.column_templates import Transform
from tunekit.data.column_usage import ColumnUsage
from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.data.prompts import Prompt
from tunekit.data.readers.row_reader import Row, require_row
from tunekit.data.row_errors import USER_CODE_ERRORS, format_row_error
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.generation.generate import check_prompt_length
from tunekit.rollouts.rollout import PromptRow

LocatedPrompt = tuple[str, Prompt]  # file and row of a prompt, and the prompt


class PromptOptions(Protocol):
    """Keys of the recipe that select prompts and their format."""

    @property
    def prompts(self) -> tuple[str, ...]: ...

    @property
    def source(self) -> str | None: ...

    @property
    def split(self) -> str: ...

    @property
    def transforms(self) -> tuple[Transform, ...]: ...

    @property
    def system_prompt(self) -> str | None: ...

    @property
    def apply_chat_template(self) -> bool: ...


def make_dataset(cfg: PromptOptions) -> PromptDataset:
    """Dataset of the prompts, which reads them as recipe grpo does. Raise FieldError if keys contradict."""
    if not cfg.prompts and cfg.source is None:
        raise FieldError("prompts", "no prompts. Set prompts or source.")
    if cfg.system_prompt is not None and not cfg.apply_chat_template:
        raise FieldError("system_prompt", "needs the chat template. Remove it, or set apply_chat_template=true.")
    if cfg.transforms and cfg.source is None:
        raise FieldError("transforms", "change rows, and there are none. Set source.")
    prompt_format = "chat" if cfg.apply_chat_template else "text"
    source = "prompts" if cfg.source is None else cfg.source
    options = {"system_prompt": cfg.system_prompt, "transforms": cfg.transforms}
    return PromptDataset(source, cfg.split, prompt_format=prompt_format, **options)


def read_prompts(cfg: PromptOptions, usage: ColumnUsage | None = None) -> Iterator[LocatedPrompt]:
    """The prompts of the config, then those of the source, whose columns are added to `usage`.

    Raise UserError, with the row, if a row has none.
    """
    data = make_dataset(cfg)
    texts = (Row(f"prompts.{index}", {"prompt": text}) for index, text in enumerate(cfg.prompts))
    rows = map(require_row, data.open_rows().rows if cfg.source is not None else ())
    for dataset, row in chain(zip(repeat(replace(data, transforms=())), texts), zip(repeat(data), rows)):
        try:
            fields = dataset.apply_transforms(row.fields)
            if fields is None:
                continue
            prompt = dataset.read_prompt(fields)
        except (UserError, *USER_CODE_ERRORS) as error:
            message = format_row_error(error, row.fields, dataset, *dataset.transforms)
            raise UserError(f"{row.where}: {message}") from None
        if usage is not None:
            usage.add(row.where, fields, lambda: "")
        yield row.where, prompt._replace(columns=dict(prompt.columns))


def open_prompts(cfg: PromptOptions, readers: ColumnReaders, dist: DistributedContext) -> list[LocatedPrompt]:
    """All prompts. Log the columns that neither they nor the rewards and the environment, the `readers`, use."""
    usage = ColumnUsage()
    prompts = [*read_prompts(cfg, usage)]
    if not prompts:
        raise UserError(f"source: {cfg.source}: {'transforms remove all rows' if cfg.transforms else 'has no rows'}")
    for finding in column_findings("source", usage.reports, len(prompts), readers):
        dist.log(f"{finding.severity}: source: {finding.message} ({', '.join(finding.row_locations)}).")
    return prompts


def encode_prompts(cfg: PromptOptions, prompts: Iterable[LocatedPrompt], tokenizer: Tokenizer) -> list[PromptRow]:
    """Prompts with their tokens. Raise UserError, with the row, if the chat template fails."""
    data, rows = make_dataset(cfg), []
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
