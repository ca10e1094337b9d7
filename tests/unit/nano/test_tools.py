"""Dataset `tunekit/tools`."""

import json

import pytest

from scripts.nano.tool_requests import TOOL_REQUESTS
from tunekit import assets

DATASET_DIR = assets.DATA["tunekit/tools"]


def read_calls(split: str) -> list[tuple[str, str]]:
    conversations = [json.loads(line)["messages"] for line in (DATASET_DIR / f"{split}.jsonl").read_text().splitlines()]
    assert all([message["role"] for message in messages] == ["user", "assistant"] for messages in conversations)
    return [(prompt["content"], answer["content"]) for prompt, answer in conversations]


@pytest.mark.parametrize("split", ["train", "test"])
def test_arguments_occur_in_the_request(split):
    counts = dict.fromkeys((request.tool for request in TOOL_REQUESTS), 0)
    keys = {request.tool: list(request.argument_slots) for request in TOOL_REQUESTS}
    for prompt, answer in read_calls(split):
        call = json.loads(answer)
        assert list(call) == ["name", "arguments"]
        assert list(call["arguments"]) == keys[call["name"]]
        assert all(str(value) in prompt for value in call["arguments"].values()), (prompt, answer)
        counts[call["name"]] += 1
    assert len(set(counts.values())) == 1
