"""Tokens in log-probabilities: their bytes, and their offsets in the text, also inside a character."""

from pathlib import Path
from typing import Any

import pytest

from tunekit.data.token_bytes import TokenBytes
from tunekit.data.tokenizer import TextStreamer, Tokenizer
from tunekit.generation.requests import TokenOutput
from tunekit.generation.stop_strings import StopStrings
from tunekit.serving.choices import Choice
from tunekit.serving.request_fields import parse_chat_request, parse_completion_request
from tunekit.serving.responses import Endpoint, ResponseFormat

TEXTS = ("é é!", "a 😀😀 né <b>", "𝔘 x\n你好", "naïve  café")
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}


def answer(tokenizer: Tokenizer, endpoint: Endpoint, ids: list[int], **options: Any) -> dict[str, Any]:
    """A choice of a response whose answer has these tokens."""
    if endpoint == "chat":
        parsed = parse_chat_request(CHAT | {"top_logprobs": 2} | options).options
    else:
        parsed = parse_completion_request({"model": "m", "prompt": "Hi", "logprobs": 2} | options).options
    choice = Choice(tokenizer, parsed, StopStrings(tokenizer, parsed.sampling.stop_strings), None, [1])
    for index, token in enumerate(ids):
        top = [(token, -1.0), (ids[0], -2.0)]
        choice.add(TokenOutput("r", token, -1.0, top, "length" if index == len(ids) - 1 else None))
    return ResponseFormat(endpoint, tokenizer, parsed, 1).choice(0, choice)


@pytest.mark.parametrize("name", ["chatml", "turns", "brackets"])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_are_those_of_the_text(name: str, text: str, tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs[name])
    ids = tokenizer.encode(text)
    items = answer(tokenizer, "chat", ids)["logprobs"]["content"]
    assert bytes(byte for item in items for byte in item["bytes"]) == text.encode()
    assert items[0]["top_logprobs"][0]["bytes"] == items[0]["bytes"]
    by_id = answer(tokenizer, "chat", ids, return_tokens_as_token_ids=True)["logprobs"]["content"]
    assert [item["token"] for item in by_id] == [f"token_id:{token}" for token in ids]
    assert [item["bytes"] for item in by_id] == [item["bytes"] for item in items]


@pytest.mark.parametrize("name", ["chatml", "turns"])
@pytest.mark.parametrize("text", TEXTS)
def test_offsets_count_the_characters_before_a_token(name: str, text: str, tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs[name])
    ids, token_bytes = tokenizer.encode(text), TokenBytes(tokenizer)
    logprobs = answer(tokenizer, "completion", ids)["logprobs"]
    before = [b"".join(map(token_bytes, ids[:index])) for index in range(len(ids))]
    assert logprobs["text_offset"] == [len(value.decode(errors="ignore")) for value in before]
    assert all(len(top) == len({ids[0], token}) for top, token in zip(logprobs["top_logprobs"], ids, strict=True))


def test_offsets_end_where_a_stop_string_cuts_the_text(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"])
    choice = answer(tokenizer, "completion", tokenizer.encode("é 12 é 😀"), stop=" é")
    assert choice["text"] == "é 12"
    assert max(choice["logprobs"]["text_offset"]) == 4


def test_special_tokens_have_their_text_and_unknown_ids_none(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"])
    token_bytes = TokenBytes(tokenizer)
    (stop,) = tokenizer.encode("<|im_end|>")
    assert token_bytes(stop) == b"<|im_end|>" and token_bytes(tokenizer.size + 5) == b""


@pytest.mark.parametrize("name", ["chatml", "turns"])
def test_streamed_parts_of_characters_are_never_shown(name: str, tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs[name])
    streamer = TextStreamer(tokenizer)
    parts = [streamer.add(token) for token in tokenizer.encode(TEXTS[1])]
    assert "".join(parts) == TEXTS[1] and "\ufffd" not in "".join(parts)
