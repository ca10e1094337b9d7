"""Questions of rows for evaluation: what a deployed model gets for the last answer of a row, and the answer."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.datasets import DatasetConfig
from tunekit.data.document import DocFlags, Document
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.row_errors import USER_CODE_ERRORS, format_row_error
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError


class EvaluationRow(NamedTuple):
    """File and row of a document, the document, and the generation prompt of its last answer.

    Without a prompt, the answer is to the tokens before it in the document. Rows of text and tokens have none.
    """

    where: str
    document: Document
    prompt: list[int] | None = None


class Question(NamedTuple):
    """Location of a row, its tokens up to the last answer, the same as text, and the expected answer."""

    row: str
    prompt: list[int]
    text: str
    expected: str


def read_rows(loader: DataLoader, tokenizer: Tokenizer, limit: int | None = None) -> list[EvaluationRow]:
    """The first documents of all datasets with their prompts, for which their rows are read again."""
    rows: list[EvaluationRow] = []
    for config, dataset in zip(loader.mixture.dataset_configs, loader.datasets, strict=True):
        count = len(dataset) if limit is None else min(len(dataset), limit - len(rows))
        documents = [EvaluationRow(dataset.row_location(i), dataset[i]) for i in range(count)]
        rows += add_prompts(documents, config.open_rows().rows, config, config.prepare_tokenizer(tokenizer))
    return rows


def add_prompts(
    documents: Iterable[EvaluationRow], rows: Iterable[Row | BadRow], config: DatasetConfig, tokenizer: Tokenizer
) -> list[EvaluationRow]:
    """Documents with the prompts of their `rows`, of which no more are read than needed."""
    documents = list(documents)
    missing = {where for where, document, _ in documents if answer_start(document) is not None}
    prompts: dict[str, list[int] | None] = {}
    for row in rows if missing else ():
        if isinstance(row, Row) and row.where in missing:
            prompts[row.where] = encode_prompt(row, config, tokenizer)
            if len(prompts) == len(missing):
                break
    return [row._replace(prompt=prompts.get(row.where)) for row in documents]


def encode_prompt(row: Row, config: DatasetConfig, tokenizer: Tokenizer) -> list[int] | None:
    """Token ids of the conversation up to the last answer, with the start of an answer; None without a conversation."""
    try:
        fields = config.apply_transforms(row.fields)
        if fields is None:
            raise UserError("a transform now removes this row. Transforms must be deterministic")
        conversation = config.prompt_conversation(fields)
        return conversation and encode_conversation(tokenizer, conversation.messages, conversation.tools)
    except (UserError, *USER_CODE_ERRORS) as error:
        raise UserError(f"{row.where}: {format_row_error(error, row.fields, config)}") from None


def iter_questions(rows: Iterable[EvaluationRow], tokenizer: Tokenizer) -> Iterator[Question]:
    """The last answer of each row. Truncated or split rows, and plain text, which has no prompt, are skipped."""
    for where, document, prompt in rows:
        if (start := answer_start(document)) is not None:
            tokens = document.tokens.tolist()
            prompt = tokens[:start] if prompt is None else prompt
            start = max(start, common_length(prompt, tokens))  # the prompt may start the answer: <think>
            answer = document.tokens[start:][document.loss_mask[start:]].tolist()
            yield Question(where, prompt, tokenizer.decode(prompt).strip(), tokenizer.decode(answer).strip())


def answer_start(document: Document) -> int | None:
    """Position of the first token of the last run of target tokens; None in a row without a prompt, or in a part."""
    positions = document.loss_mask.nonzero()[0]
    is_part = len(document.tokens) < document.full_length or document.doc_flags & DocFlags.SPLIT
    if is_part or not len(positions):
        return None
    gaps = (positions[1:] - positions[:-1] > 1).nonzero()[0]
    return int(positions[gaps[-1] + 1] if len(gaps) else positions[0]) or None


def common_length(first: list[int], second: list[int]) -> int:
    """Number of tokens at the start that are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, pair in pairs if pair[0] != pair[1]), min(len(first), len(second)))
