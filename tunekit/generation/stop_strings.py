"""Texts that end an answer."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from tunekit.data.tokenizer import Tokenizer

MAX_CHARACTER_TOKENS = 4  # of an incomplete character: a token has at least one byte


class StopStrings:
    """Ends answers at the stop tokens of a tokenizer, and at the first of some texts, which are not part of the answer.

    generate_batch(model, prompts, sampling, stop.token_ids, is_finished=stop.is_finished)
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str] = ()) -> None:
        self.tokenizer, self.texts = tokenizer, tuple(filter(None, texts))
        self.num_checked = max((len(text.encode()) for text in self.texts), default=0) + MAX_CHARACTER_TOKENS

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """Ids that end an answer: decoded answers do not contain special tokens."""
        special_ids = self.tokenizer.special_ids.items()
        return self.tokenizer.stops | {token for token, text in special_ids if text in self.texts}

    def is_finished(self, answer: Sequence[int]) -> bool:
        """Whether an answer contains a stop string, of which the last token is a part."""
        return bool(self.texts) and self.is_in(self.tokenizer.decode(answer[-self.num_checked :]))

    def is_in(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        return text[: min((text.find(stop) for stop in self.texts if stop in text), default=len(text))]

    def printable(self, text: str) -> str:
        """The text without an end that may be the start of a stop string."""
        lengths = (n for stop in self.texts for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return text[: len(text) - max(lengths, default=0)]
