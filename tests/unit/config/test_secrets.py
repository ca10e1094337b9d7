"""Secrets of addresses are hidden, and control characters of strangers are escaped."""

import pytest

from tunekit.config.secrets import has_hidden_secret, hide_secrets, map_strings, message_text

ADDRESSES = {
    "https://user:SECRET@host/x.jsonl": "https://***@host/x.jsonl",
    "s3://SECRET@bucket/x": "s3://***@bucket/x",
    "https://h/x?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET&page=2": (
        "https://h/x?X-Amz-Credential=***&X-Amz-Signature=***&page=2"
    ),
    "https://h/x?sv=2024&sig=SECRET%2Fx": "https://h/x?sv=2024&sig=***",
    "https://h/x?AWSAccessKeyId=SECRET": "https://h/x?AWSAccessKeyId=***",
    "model: hf_SECRETSECRETSECRETSECRET": "model: ***",
}


@pytest.mark.parametrize(("address", "shown"), ADDRESSES.items())
def test_secrets_are_hidden_once(address: str, shown: str) -> None:
    assert hide_secrets(address) == shown == hide_secrets(shown)
    assert has_hidden_secret(shown) or "://" not in shown
    assert map_strings({"data": [{"source": address}], "n": 1}, hide_secrets) == {"data": [{"source": shown}], "n": 1}


@pytest.mark.parametrize(
    "text", ["https://h/x?page=2#signature", "a@b.c", "tunekit/nano", "x?a=b", "s3://bucket/key=1/x"]
)
def test_other_text_is_unchanged(text: str) -> None:
    assert hide_secrets(text) == text and not has_hidden_secret(text)


def test_messages_are_escaped_and_cut() -> None:
    assert message_text("\x1b[31mred\u202e \udce9\n\tok é 漢") == "\\x1b[31mred\\u202e \\udce9\n\\tok é 漢"
    assert len(message_text("x" * 10**6)) < 5000
