"""UTF-8 bytes of single tokens, which may be a part of a character that decoding alone shows as U+FFFD."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tunekit.data.tokenizer import Tokenizer

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}


def byte_level_alphabet() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level vocabularies: printable ones for themselves."""
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    return {chr(byte): byte for byte in PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(others)}


ALPHABET = byte_level_alphabet()


class TokenBytes:
    """Bytes of tokens inside a text: a space that a decoder strips from the start of a text is a part of the token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.model = tokenizer.model

    @cached_property
    def steps(self) -> set[str]:
        """Types of the steps of the decoder."""
        decoder = self.model.decoder
        return set() if decoder is None else set(step_types(json.loads(decoder.__getstate__())))

    def __call__(self, token: int) -> bytes:
        """Bytes of a token; none of an id that the tokenizer lacks."""
        piece = self.model.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self.steps:
            values = [ALPHABET.get(char) for char in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        match = BYTE_TOKEN.fullmatch(piece)
        if match and "ByteFallback" in self.steps:
            return bytes([int(match[1], 16)])
        once, twice = (self.model.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode()

    def label(self, token: int, prefix: str = "") -> str:
        r"""Text of a token. One that is a part of a character has a prefix and bytes such as \xf0\x9f."""
        value = self(token)
        text = value.decode(errors="backslashreplace")
        return text if text.encode() == value else prefix + text


def step_types(step: dict[str, Any]) -> Iterator[str]:
    """Types of a decoder and of the steps that it consists of."""
    yield step["type"]
    for child in step.get("decoders", ()):
        yield from step_types(child)
