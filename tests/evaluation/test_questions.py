"""What is asked of rows: the last answer of those that are whole."""

import pytest

from tunekit import assets
from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import TooLong
from tunekit.evaluation.generation_eval import iter_questions

TALK = [
    {"role": role, "content": text}
    for question, answer in (("One?", "It is one, as I said."), ("Two?", "It is two, and no more."))
    for role, text in (("user", question), ("assistant", answer))
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(assets.MODELS["tunekit/nano"])


@pytest.mark.parametrize(
    ("length", "too_long", "wanted"),
    [
        (64, "split", ["It is two, and no more."]),
        (64, "truncate", ["It is two, and no more."]),
        (12, "truncate", []),
        (12, "split", []),
    ],
)
def test_parts_of_a_row_ask_nothing(length: int, too_long: TooLong, wanted: list[str], tokenizer: Tokenizer) -> None:
    rows = ChatDataset("rows.jsonl", max_length=length, excess_length_strategy=too_long)
    found = rows.encode(rows.prepare(tokenizer), [Row("rows.jsonl:1", {"messages": TALK})])[0]
    assert isinstance(found, list) and (len(found) > 1) == (length == 12 and too_long == "split")
    assert [
        question.expected for question in iter_questions([("rows.jsonl:1", one) for one in found], tokenizer)
    ] == wanted
