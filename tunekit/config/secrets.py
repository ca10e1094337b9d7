"""Text that is shown or written: passwords in addresses are hidden, and control characters are escaped."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

HIDDEN = "***"
CREDENTIALS = re.compile(r"(?<=://)(?!\*\*\*@)[^/@\s\"'`]+@")  # user and password before the host of a URL
QUERY = re.compile(
    r"([?&](?:[\w.-]*(?:token|key|secret|password|signature|credential)[\w.-]*|sig)=)[^&\s\"'`]+", re.IGNORECASE
)
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
MAX_MESSAGE = 4000  # characters


def hide_secrets(text: str) -> str:
    """Replace the user and password of URLs, signed query parameters and Hub tokens by `***`."""
    return HUB_TOKEN.sub(HIDDEN, QUERY.sub(rf"\1{HIDDEN}", CREDENTIALS.sub(f"{HIDDEN}@", text)))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with all strings changed, except keys."""
    if isinstance(value, dict):
        return {key: map_strings(child, change) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(child, change) for child in value]
    return change(value) if isinstance(value, str) else value


def iter_strings(value: Any) -> Iterator[str]:
    """All strings in plain data, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for child in value.values() if isinstance(value, dict) else value:
            yield from iter_strings(child)


def has_hidden_secret(address: str) -> bool:
    """Whether a secret of an address was replaced by `hide_secrets`."""
    return f"://{HIDDEN}@" in address or f"={HIDDEN}" in address


def escape_control(text: str) -> str:
    """Escape control and formatting characters except newlines, such as terminal sequences and right-to-left marks."""
    return "".join(
        ascii(char)[1:-1] if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs") else char
        for char in text
    )


def message_text(error: object) -> str:
    """An error as shown on a terminal: without secrets and control characters, and of limited length."""
    text = escape_control(hide_secrets(str(error)))
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}... ({len(text):,} characters)"
