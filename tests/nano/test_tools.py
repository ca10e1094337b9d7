"""The data set of the skill."""

import json

import pytest

from tunekit import assets
from tunekit.nano.requests import REQUESTS

FOLDER = assets.DATA["tunekit/tools"]


def rows(split: str) -> list[tuple[str, str]]:
    found = [json.loads(line)["messages"] for line in (FOLDER / f"{split}.jsonl").read_text().splitlines()]
    assert all([message["role"] for message in messages] == ["user", "assistant"] for messages in found)
    return [(ask["content"], answer["content"]) for ask, answer in found]


@pytest.mark.parametrize("split", ["train", "test"])
def test_calls_are_made_of_their_requests(split):
    count = dict.fromkeys((request.tool for request in REQUESTS), 0)
    keys = {request.tool: list(request.arguments) for request in REQUESTS}
    for ask, answer in rows(split):
        call = json.loads(answer)
        assert list(call) == ["name", "arguments"]
        assert list(call["arguments"]) == keys[call["name"]]
        assert all(str(value) in ask for value in call["arguments"].values()), (ask, answer)
        count[call["name"]] += 1
    assert len(set(count.values())) == 1
