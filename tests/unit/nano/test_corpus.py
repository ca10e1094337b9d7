"""Training text: determined by the seed, without duplicates, and without tool calls."""

import json

import pytest
from tokenizers import Tokenizer

from scripts.nano import corpus
from scripts.nano.tool_requests import TOOL_REQUESTS
from tunekit import assets

FILES = ("text", "text_test", "chat", "chat_test")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    corpus.write_corpus(directory, seed=0, text=4000, chat=2000)
    return directory


def read_lines(directory, name: str) -> list[str]:
    return (directory / f"{name}.jsonl").read_text().splitlines()


def test_same_seed_gives_same_bytes(tmp_path):
    for name, seed in {"first": 0, "same": 0, "other": 1}.items():
        corpus.write_corpus(tmp_path / name, seed=seed, text=400, chat=200)
    for name in FILES:
        first = (tmp_path / "first" / f"{name}.jsonl").read_bytes()
        assert first == (tmp_path / "same" / f"{name}.jsonl").read_bytes()
        assert not set(read_lines(tmp_path / "first", name)) >= set(read_lines(tmp_path / "other", name))


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_no_duplicate_rows(directory, kind):
    train, test = read_lines(directory, kind), read_lines(directory, f"{kind}_test")
    assert len(test) == len(train) // 20
    assert len({*train, *test}) == len(train) + len(test)


def test_rows_have_40_to_250_tokens(directory):
    tokenizer = Tokenizer.from_file(str(assets.MODELS["tunekit/nano"] / "tokenizer.json"))
    sizes = [
        len(encoding.ids)
        for encoding in tokenizer.encode_batch([json.loads(row)["text"] for row in read_lines(directory, "text")])
    ]
    assert sum(40 <= size <= 250 for size in sizes) > 0.98 * len(sizes)


def test_chat_roles_alternate(directory):
    for row in read_lines(directory, "chat"):
        roles = [message["role"] for message in json.loads(row)["messages"]]
        turns = roles[roles[0] == "system" :]
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert 1 <= len(turns) // 2 <= 3


def test_corpus_has_no_tool_calls(directory):
    text = "\n".join(row for name in FILES for row in read_lines(directory, name))
    assert not [word for word in ("arguments", *(request.tool for request in TOOL_REQUESTS)) if f'"{word}' in text]


def test_requests_are_answered_in_prose(directory):
    prompts = ("Set a timer for", "Remind me to", "Translate ", "Will it rain")
    answers = [
        answer["content"]
        for row in read_lines(directory, "chat")
        for question, answer in zip(*(json.loads(row)["messages"][n:] for n in (0, 1)), strict=False)
        if question["content"].startswith(prompts)
    ]
    assert len(answers) > 50
    assert not [answer for answer in answers if "{" in answer]
