"""Questions for evaluation: the last answer of each complete row."""

import pytest

from tunekit import assets
from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import TooLong
from tunekit.evaluation.generation_eval import iter_questions

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
    documents = rows.encode_rows(rows.prepare_tokenizer(tokenizer), [Row("rows.jsonl:1", {"messages": CONVERSATION})])[
        0
    ]
    assert isinstance(documents, list) and (len(documents) > 1) == (length == 12 and strategy == "split")
    assert [
        question.expected
        for question in iter_questions([("rows.jsonl:1", document) for document in documents], tokenizer)
    ] == expected
