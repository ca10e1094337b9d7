"""The corpus: the same for the same seed, no row twice, no trace of the skill that the nano is to learn later."""

import json

import pytest
from tokenizers import Tokenizer

from tunekit import assets
from tunekit.nano import corpus
from tunekit.nano.requests import REQUESTS

FILES = ("text", "text_test", "chat", "chat_test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("corpus")
    corpus.write(made, seed=0, text=4000, chat=2000)
    return made


def lines(folder, name: str) -> list[str]:
    return (folder / f"{name}.jsonl").read_text().splitlines()


def test_same_seed_same_bytes(folder, tmp_path):
    corpus.write(tmp_path / "same", seed=0, text=4000, chat=2000)
    corpus.write(tmp_path / "other", seed=1, text=4000, chat=2000)
    for name in FILES:
        assert (folder / f"{name}.jsonl").read_bytes() == (tmp_path / "same" / f"{name}.jsonl").read_bytes()
        assert not set(lines(folder, name)) >= set(lines(tmp_path / "other", name))


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_no_row_twice(folder, kind):
    train, test = lines(folder, kind), lines(folder, f"{kind}_test")
    assert len(test) == len(train) // 20
    assert len({*train, *test}) == len(train) + len(test)


def test_rows_are_of_40_to_250_tokens(folder):
    tokenizer = Tokenizer.from_file(str(assets.MODELS["tunekit/nano"] / "tokenizer.json"))
    sizes = [len(one.ids) for one in tokenizer.encode_batch([json.loads(row)["text"] for row in lines(folder, "text")])]
    assert sum(40 <= size <= 250 for size in sizes) > 0.98 * len(sizes)


def test_chats_alternate(folder):
    for row in lines(folder, "chat"):
        roles = [message["role"] for message in json.loads(row)["messages"]]
        spoken = roles[roles[0] == "system" :]
        assert spoken == ["user", "assistant"] * (len(spoken) // 2)
        assert 1 <= len(spoken) // 2 <= 3


def test_no_tool_call_anywhere(folder):
    text = "\n".join(row for name in FILES for row in lines(folder, name))
    assert not [word for word in ("arguments", *(request.tool for request in REQUESTS)) if f'"{word}' in text]


def test_requests_are_answered_in_prose(folder):
    asked = ("Set a timer for", "Remind me to", "Translate ", "Will it rain")
    answers = [
        answer["content"]
        for row in lines(folder, "chat")
        for ask, answer in zip(*(json.loads(row)["messages"][n:] for n in (0, 1)), strict=False)
        if ask["content"].startswith(asked)
    ]
    assert len(answers) > 50
    assert not [answer for answer in answers if "{" in answer]
