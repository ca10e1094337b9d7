"""Dataset `tunekit/tools`."""

import json

import pytest

from scripts.nano.requests import REQUESTS
from tunekit import assets

FOLDER = assets.DATA["tunekit/tools"]


def rows(split: str) -> list[tuple[str, str]]:
    conversations = [json.loads(line)["messages"] for line in (FOLDER / f"{split}.jsonl").read_text().splitlines()]
    assert all([message["role"] for message in messages] == ["user", "assistant"] for messages in conversations)
    return [(prompt["content"], answer["content"]) for prompt, answer in conversations]


@pytest.mark.parametrize("split", ["train", "test"])
def test_arguments_occur_in_the_request(split):
    counts = dict.fromkeys((request.tool for request in REQUESTS), 0)
    keys = {request.tool: list(request.arguments) for request in REQUESTS}
    for prompt, answer in rows(split):
        call = json.loads(answer)
        assert list(call) == ["name", "arguments"]
        assert list(call["arguments"]) == keys[call["name"]]
        assert all(str(value) in prompt for value in call["arguments"].values()), (prompt, answer)
        counts[call["name"]] += 1
    assert len(set(counts.values())) == 1
