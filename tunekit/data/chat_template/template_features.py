"""How a template wants what can be said in several ways: found by trying, and asked of no name of a family."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tunekit.data.chat_template.messages import REASONING, Message
from tunekit.data.chat_template.template import ChatTemplate
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

ASKED, SAID, CALLED, MORE = "qaz", "wsx", "edc", "rfv"  # no template writes them by itself
KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING})
ID = "call{:05}"  # some templates want nine characters
NOTHING: tuple[Message, ...] = ({"content": None}, {"content": ""}, {})  # beside calls


@dataclass(frozen=True)
class TemplateFeatures:
    """`parts`: text is read only in content parts. `nothing`: which ways to say nothing beside calls are understood.

    `ids`: whether ids of calls can be seen in the text; where not, rows of one shape differ less without theirs.
    `source`: the text of the template; a key of a message whose name is not in it is left out, unless all are written.
    """

    parts: bool = False
    nothing: tuple[bool, ...] = (True, True, True)
    ids: bool = True
    source: str | None = None

    def fit(self, messages: list[Message]) -> list[Message]:
        """Messages as the template wants them."""
        if not self.parts and all(len(message) == 2 for message in messages):
            return messages
        ids: dict[str, str] = {}
        return [self.fitted(message, ids) for message in messages]

    def fitted(self, message: Message, ids: dict[str, str]) -> Message:
        if len(message) > 2:
            message = {key: value for key, value in message.items() if self.reads(key)}
            if "tool_calls" in message and not message.get("content"):
                message = self.silent(message)
            if not self.ids:
                message = numbered(message, ids)
        if self.parts and message.get("content"):
            message = {**message, "content": in_parts(message["content"])}
        return message

    def reads(self, key: str) -> bool:
        return key in KNOWN or self.source is None or key in self.source

    def silent(self, message: Message) -> Message:
        """A message that only calls, in a way that is understood."""
        way = {"content": message["content"]} if "content" in message else {}
        if self.nothing[NOTHING.index(way)] or not any(self.nothing):
            return message
        rest = {key: value for key, value in message.items() if key != "content"}
        return rest | NOTHING[self.nothing.index(True)]


def in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def numbered(message: Message, ids: dict[str, str]) -> Message:
    """A message with the conversation's ids by their numbers: what is one id stays one."""
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": number(message["tool_call_id"], ids)}
    if "tool_calls" in message:
        calls = [{**call, "id": number(call["id"], ids)} if "id" in call else call for call in message["tool_calls"]]
        message = {**message, "tool_calls": calls}
    return message


def number(name: str, ids: dict[str, str]) -> str:
    return ids.setdefault(name, ID.format(len(ids)))


@lru_cache(maxsize=16)
def detect_features(template: ChatTemplate, tokenizer: Tokenizer) -> TemplateFeatures:
    """How this template wants messages."""
    trial = TemplateProbe(template, tokenizer, str)
    plain = trial.plain()
    parts = TemplateProbe(template, tokenizer, in_parts)
    if not heard(plain) and heard(parts.plain()):
        trial, plain = parts, parts.plain()
    nothing = understood([trial.call(way) for way in NOTHING], plain.count("None"))
    way = NOTHING[nothing.index(True)] if True in nothing else NOTHING[0]
    first, second = (trial.call(way, ID.format(number), answered=True) for number in (1, 2))
    source = "\n".join(text for text, _ in tokenizer.templates.values())
    return TemplateFeatures(
        trial is parts, nothing, first != second or not first, source if trial.plain(MORE) == plain else None
    )


def understood(texts: list[str], nones: int) -> tuple[bool, ...]:
    """Which of the ways to say nothing are written as nothing, with the call, if any is written with it."""
    clean = [bool(text) and text.count("None") <= nones for text in texts]
    called = [good and CALLED in text for good, text in zip(clean, texts, strict=True)]
    return tuple(called if any(called) else clean)


def heard(text: str) -> bool:
    return ASKED in text and SAID in text


@dataclass(frozen=True)
class TemplateProbe:
    """Conversations that a template is tried with; `form` makes a content of a text."""

    template: ChatTemplate
    tokenizer: Tokenizer
    form: Callable[[str], Any]

    def plain(self, more: str | None = None) -> str:
        """A question and its answer, which has a key that nobody knows, if one is given."""
        extra = {} if more is None else {more: more}
        return self.written([{"role": "assistant", "content": self.form(SAID), **extra}])

    def call(self, way: Message, name: str = ID.format(0), answered: bool = False) -> str:
        """A question and a call, and what follows on it."""
        call = {"type": "function", "id": name, "function": {"name": CALLED, "arguments": {}}}
        result = {"role": "tool", "tool_call_id": name, "name": CALLED, "content": self.form(SAID)}
        answer = {"role": "assistant", "content": self.form(SAID)}
        return self.written([{"role": "assistant", **way, "tool_calls": [call]}, *([result, answer] * answered)])

    def written(self, messages: list[Message]) -> str:
        """What the template writes of a question and these; nothing, if it refuses them."""
        try:
            asked = {"role": "user", "content": self.form(ASKED)}
            return self.template.render(self.tokenizer.context([asked, *messages]))
        except UserError:
            return ""
