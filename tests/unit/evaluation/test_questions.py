"""Questions for evaluation: the last answer of each complete row."""

from typing import Any

import pytest

from tests.helpers.encode_rows import encode_row
from tunekit import assets
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.datasets import ChatDataset, DatasetConfig
from tunekit.data.document import Document
from tunekit.data.readers.row_reader import Row
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import RenameColumns
from tunekit.data.truncation import TooLong
from tunekit.evaluation.evaluation_rows import EvaluationRow, Question, add_prompts, iter_questions

CONVERSATION = [
    {"role": role, "content": text}
    for question, answer in (("One?", "It is one, as I said."), ("Two?", "It is two, and no more."))
    for role, text in (("user", question), ("assistant", answer))
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(assets.MODELS["tunekit/nano"])


@pytest.mark.parametrize(
    ("length", "strategy", "expected"),
    [
        (64, "split", ["It is two, and no more."]),
        (64, "truncate", ["It is two, and no more."]),
        (12, "truncate", []),
        (12, "split", []),
    ],
)
def test_questions_come_only_from_complete_rows(
    length: int, strategy: TooLong, expected: list[str], tokenizer: Tokenizer
) -> None:
    rows = ChatDataset("rows.jsonl", max_length=length, excess_length_strategy=strategy)
    questions, documents = find_questions(rows, tokenizer, {"messages": CONVERSATION})
    assert (len(documents) > 1) == (length == 12 and strategy == "split")
    assert [question.expected for question in questions] == expected


def find_questions(
    dataset: DatasetConfig, tokenizer: Tokenizer, fields: dict[str, Any]
) -> tuple[list[Question], list[Document]]:
    """Questions of a row, and its documents."""
    documents, row = encode_row(dataset, tokenizer, fields), Row("rows.jsonl:1", fields)
    assert isinstance(documents, list)
    located = [EvaluationRow(row.where, document) for document in documents]
    return [*iter_questions(add_prompts(located, [row], dataset, tokenizer), tokenizer)], documents


SYSTEM, USER, FIRST, MORE, LAST = {"role": "system", "content": "Be brief."}, *CONVERSATION
TURNS = {"messages": CONVERSATION}
MARKED = {**FIRST, "train": True}
OTHER = {"role": "assistant", "content": "It is three."}


@pytest.mark.parametrize(("dataset", "row", "messages", "expected"), [
    (AutoDataset("x"), TURNS, [USER, FIRST, MORE], LAST),
    (AutoDataset("x"), {"messages": [USER, OTHER, FIRST]}, [USER], FIRST),  # no second answer is generated
    (AutoDataset("x"), {"messages": [USER, FIRST, MORE]}, [USER], FIRST),
    (AutoDataset("x", train_on="per_message"), {"messages": [USER, MARKED, MORE, LAST]}, [USER], FIRST),
    (AutoDataset("x"), {**TURNS, "system": "Be brief."}, [SYSTEM, USER, FIRST, MORE], LAST),
    (AutoDataset("x"), {"prompt": "One?", "completion": [FIRST]}, [USER], FIRST),
    (AutoDataset("x"), {"instruction": "One?", "output": FIRST["content"]}, [USER], FIRST),
    (AutoDataset("x", transforms=(RenameColumns({"turns": "messages"}),)), {"turns": CONVERSATION[:2]}, [USER], FIRST),
])  # fmt: skip
def test_questions_are_the_messages_before_the_last_answer(
    dataset: DatasetConfig, row: dict[str, Any], messages: list[dict], expected: dict, tokenizer: Tokenizer
) -> None:
    (question,), _ = find_questions(dataset, tokenizer, row)
    assert question.prompt == encode_conversation(tokenizer, messages)
    assert question.expected == expected["content"]


@pytest.mark.parametrize(("dataset", "row"), [
    (AutoDataset("x"), {"prompt": "One", "completion": " is one."}),
    (AutoDataset("x"), {"segments": [{"text": "One", "train": False}, {"text": " is one.", "train": True}]}),
    (AutoDataset("x"), {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}),
    (AutoDataset("x"), {"messages": [FIRST]}),
    (AutoDataset("x", train_on=("user",)), {"messages": [USER, FIRST, MORE]}),
])  # fmt: skip
def test_rows_without_messages_to_answer_are_continued(
    dataset: DatasetConfig, row: dict[str, Any], tokenizer: Tokenizer
) -> None:
    (question,), (document,) = find_questions(dataset, tokenizer, row)
    assert question.prompt == document.tokens[: len(question.prompt)].tolist()
    assert document.loss_mask[len(question.prompt) :].any()


def test_no_more_rows_are_read_than_needed(tokenizer: Tokenizer) -> None:
    dataset, rows = AutoDataset("x"), iter([Row(f"rows.jsonl:{number}", TURNS) for number in (1, 2, 3)])
    (documents,) = dataset.encode_rows(tokenizer, [Row("rows.jsonl:2", TURNS)])
    assert isinstance(documents, list)
    add_prompts([EvaluationRow("rows.jsonl:2", documents[0])], rows, dataset, tokenizer)
    assert [row.where for row in rows] == ["rows.jsonl:3"]
