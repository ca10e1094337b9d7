"""Where the turns of a conversation stand in what a chat template writes of it, whatever the template.

Texts of messages are hidden behind characters that occur nowhere else; what stands around these is the template's own.
A turn begins where the template's prompt for it ends, and ends with what the template writes behind it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from os.path import commonprefix
from typing import Any

from tunekit.data.tokenizer import PLAIN, REASONING, Tokenizer
from tunekit.errors import UserError

Span = tuple[int, int]
Mode = tuple[str, bool]
Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = list[dict[str, Any]] | None
HIDDEN = 0x17000  # the first of the characters that hide texts: Tangut script, which `repr` prints as it is
MOST = 6000  # of them
HIDES = re.compile(f"([{chr(HIDDEN)}-{chr(HIDDEN + MOST - 1)}])\\1*")
NUMBER = 7310584926_000_000  # hides the first number; a text cannot stand for one where JSON is written
NUMBERS = re.compile(r"7310584926(\d{6})")
WAY_OUT = "leave this turn out (`train_on: last`), or name a `chat_template` with {% generation %} blocks"


class AmbiguousMaskError(UserError):
    """A turn whose mask is not sure, and why."""


class SentinelMessages:
    """Messages with their texts hidden, one character for each text; `texts` are these.

    Tags that the template knows, such as `<think>`, are left in place: it looks for them in texts.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Messages, tools: Tools) -> None:
        self.texts: list[str] = []
        self.template = tokenizer.template(tools)
        self.messages: list[Message] = []
        self.bounds: list[Span] = []
        for message in messages:
            first = len(self.texts)
            self.messages.append(self.message(message))
            self.bounds.append((first, len(self.texts)))
        self.names: dict[str, str] = {}
        self.shape = [self.nameless(message) for message in self.messages]

    def nameless(self, message: Message) -> Message:
        """A message with the names and ids of its calls hidden too: they may be written with another message."""
        if message.keys() == PLAIN:
            return message
        fields = dict(message)
        for key in {"name", "tool_call_id"} & fields.keys():
            fields[key] = self.name(fields[key])
        if fields.get("tool_calls"):
            fields["tool_calls"] = [self.nameless_call(call) for call in fields["tool_calls"]]
        return fields

    def nameless_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        more = {"id": self.name(call["id"])} if "id" in call else {}
        function = call["function"]
        return {**call, **more, "function": {**function, "name": self.name(function["name"])}}

    def name(self, text: Any) -> Any:
        """A name is hidden by as many characters as it has, for templates that want ids of some length."""
        if not isinstance(text, str) or not text:
            return text
        if text not in self.names:
            self.names[text] = self.new(text) * len(text)
        return self.names[text]

    def message(self, message: Message) -> Message:
        if message.keys() == PLAIN and isinstance(message["content"], str):
            return {**message, "content": self.hide(message["content"])}
        fields = dict(message)
        for key in ("content", *REASONING):
            # An empty text is hidden only where it is all that is said: a template may pass over it beside calls.
            if key in fields and (fields[key] != "" or len(fields) == 2):
                fields[key] = self.content(fields[key])
        if fields.get("tool_calls"):
            fields["tool_calls"] = [self.call(call) for call in fields["tool_calls"]]
        return fields

    def content(self, value: Any) -> Any:
        """A text, or parts of which some have one."""
        if not isinstance(value, list):
            return self.hide(value)
        return [{**part, "text": self.hide(part["text"])} if "text" in part else part for part in value]

    def call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", {})
        return {**call, "function": {**function, "arguments": self.inside(function.get("arguments"))}}

    def inside(self, value: Any) -> Any:
        """A value of JSON with its strings and numbers hidden. Keys stay."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.texts.append(json.dumps(value))
            return NUMBER + len(self.texts) - 1
        if isinstance(value, Mapping):
            return {key: self.inside(item) for key, item in value.items()}
        return [self.inside(item) for item in value] if isinstance(value, list) else self.hide(value)

    def hide(self, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        if not any(tag in text for tag in self.template.tags):
            return self.new(text)
        parts = self.template.tagged.split(text)
        return "".join(self.new(part) if at % 2 == 0 and part.strip() else part for at, part in enumerate(parts))

    def new(self, text: str) -> str:
        self.texts.append(text)
        return chr(HIDDEN + len(self.texts) - 1)


def reveal_text(text: str) -> str:
    """A text in which the numbers that hide numbers are characters, as those that hide texts."""
    return NUMBERS.sub(lambda match: chr(HIDDEN + int(match[1])), text)


class RenderedPrefixes:
    """What a template writes of a conversation, of its beginnings, and of both with a message hidden."""

    def __init__(self, tokenizer: Tokenizer, messages: Messages, tools: Tools, hidden: SentinelMessages) -> None:
        """`messages` are the real ones, or `hidden.shape` for a conversation whose texts are all hidden."""
        self.tokenizer, self.messages, self.tools, self.hidden = tokenizer, messages, tools, hidden
        self.written: dict[tuple[Any, ...], str] = {}
        self.begun: dict[int, int | None] = {}
        self.count = len(messages)
        self.text = self.write(self.count)

    def write(self, count: int, prompt: bool = False, mode: Mode | None = None, hiding: int | None = None) -> str:
        """The first `count` messages, with a variable set, and with the texts of message `hiding` hidden."""
        hiding = None if self.messages is self.hidden.shape else hiding
        key = (count, prompt, mode, hiding)
        if key not in self.written:
            messages = list(self.messages[:count])
            if hiding is not None:
                messages[hiding] = self.hidden.messages[hiding]
            more = {} if mode is None else dict([mode])
            context = self.tokenizer.context(messages, self.tools, prompt)
            text = self.tokenizer.template(self.tools).render({**context, **more})
            whole = hiding is None and self.messages is not self.hidden.shape
            self.written[key] = text if whole else reveal_text(text)
        return self.written[key]

    def sides(self, index: int, count: int, prompt: bool = False, mode: Mode | None = None) -> tuple[str, str] | None:
        """What stands before the first and behind the last text of a message; None where the template writes none."""
        low, high = self.hidden.bounds[index]
        other = self.tried(lambda: self.write(count, prompt, mode, index))
        if low == high or other is None:
            return None
        places = list(re.finditer(f"[{chr(HIDDEN + low)}-{chr(HIDDEN + high - 1)}]", other))
        return (other[: places[0].start()], other[places[-1].end() :]) if places else None

    def begins(self, index: int) -> int | None:
        """Where the texts of a message begin; None if that is not sure."""
        if index not in self.begun:
            sides = self.sides(index, self.count)
            self.begun[index] = None if sides is None or not self.text.startswith(sides[0]) else len(sides[0])
        return self.begun[index]

    def behind(self, index: int, count: int, prompt: bool = False, mode: Mode | None = None) -> str | None:
        """What stands behind the texts of a message; None if that is not sure."""
        sides = self.sides(index, count, prompt, mode)
        return None if sides is None or not self.write(count, prompt, mode).endswith(sides[1]) else sides[1]

    def tried(self, write: Callable[[], str]) -> str | None:
        """None where the template refuses."""
        try:
            return write()
        except UserError:
            return None

    def turn(self, index: int) -> Span:
        """The characters of a message that are learnt: of an assistant's, all that stands behind its prompt."""
        start = self.start(index) if self.messages[index]["role"] == "assistant" else self.begins(index)
        if start is None:
            raise AmbiguousMaskError(
                f"messages[{index}]: nothing to learn: the chat template does not write its text as it is"
            )
        return start, self.end(index, start)

    def start(self, index: int) -> int:
        """Where the prompt for an assistant's turn ends."""
        try:
            prompt = self.write(index, True)
        except UserError as error:
            raise AmbiguousMaskError(
                f"messages[{index}]: no mask is sure: no prompt for this turn: {error}; {WAY_OUT}"
            ) from None
        if self.text.startswith(prompt):
            return len(prompt)
        # The template writes the messages before otherwise when more follows. From the text of the last of them on,
        # what it writes must be what it prompts with.
        for before in reversed(range(index)):
            tail, rest = self.behind(before, index, True), self.behind(before, self.count)
            if tail is not None and rest is not None:
                size = self.prompt_size(index, before, tail, rest)
                if size is not None:
                    return len(self.text) - len(rest) + size
                break
        raise AmbiguousMaskError(
            f"messages[{index}]: no mask is sure: the chat template writes the conversation otherwise when it "
            f"prompts for this turn; {WAY_OUT}"
        )

    def prompt_size(self, index: int, before: int, tail: str, rest: str) -> int | None:
        """How much of `rest`, the text from behind the message before, is prompt; `tail` is what it is when prompting.

        All of the prompt, as it is or in another mode of the template; or its beginning, if the turn itself follows
        there; or up to the generation prompt, if that stands once before the turn's own text.
        """
        begins = self.begins(index)
        head = "" if begins is None else rest[: begins - (len(self.text) - len(rest))]
        same = len(commonprefix([tail, rest]))
        whole = chain([tail], (mode for mode in self.modes(index, before) if len(mode) >= same))
        parts = (part for part in chain([head], self.headers(index, before)) if part and tail.startswith(part))
        found = next((prompt for prompt in chain(whole, parts) if rest.startswith(prompt)), None)
        if found is not None:
            return len(found)
        asks = self.asks(index)
        once = asks is not None and head.count(asks) == 1 and self.tokenizer.mark_texts.search(asks)
        return head.index(asks) + len(asks) if asks is not None and once else None

    def modes(self, index: int, before: int) -> Iterator[str]:
        """What the template prompts with when one of the variables that it asks for and nobody set is set."""
        template = self.tokenizer.template(self.tools)
        for name in template.unset:
            for value in (False, True):
                tail = self.behind(before, index, True, (name, value))
                if tail is not None:
                    yield tail

    def headers(self, index: int, before: int) -> Iterator[str]:
        """What is written between a message's text and an assistant's that is only a text."""
        said = {"role": "assistant", "content": "a"}
        for after in (self.messages[index + 1 :], ()):
            hidden = SentinelMessages(self.tokenizer, [*self.messages[:index], said, *after], self.tools)
            text = reveal_text(
                self.tried(lambda hidden=hidden: self.tokenizer.render(hidden.messages, self.tools)) or ""
            )
            first, second = (chr(HIDDEN + hidden.bounds[place][1] - 1) for place in (before, index))
            if text.count(second) == 1 and first in text:
                yield text.partition(second)[0].rpartition(first)[2]

    def end(self, index: int, start: int) -> int:
        """Where a turn ends: behind the last special token that is written right behind its text."""
        rest = self.behind(index, self.count)
        at = start if rest is None else len(self.text) - len(rest)
        window = self.text[at : self.bound(at if rest is not None else start + 1, index)]
        for tail in self.tails(index, None if rest is not None else self.text[:start]):
            end = ending(self.tokenizer.mark_texts, window, tail, whole=rest is None)
            if end is not None:
                return self.stop((start, at + end), index)
        raise AmbiguousMaskError(
            f"messages[{index}]: no mask is sure: the chat template writes the end of this turn otherwise when more "
            f"follows; {WAY_OUT}"
        )

    def tails(self, index: int, before: str | None) -> Iterator[str]:
        """What the template writes behind a turn: when nothing follows, and when a prompt does."""
        for prompt in (False, True):
            written = self.tried(lambda prompt=prompt: self.write(index + 1, prompt))
            tail = None
            if written is not None and before is None:
                tail = self.behind(index, index + 1, prompt)
            elif written is not None and before is not None and written.startswith(before):
                tail = written[len(before) :]
            asks = self.asks(index) if prompt else ""
            if tail is not None and asks is not None and tail.endswith(asks):
                yield tail[: len(tail) - len(asks)]

    def asks(self, index: int) -> str | None:
        """The generation prompt alone."""
        written, prompt = (self.tried(lambda asked=asked: self.write(index, asked)) for asked in (False, True))
        if written is None or prompt is None or not prompt.startswith(written) or written == prompt:
            return None
        return prompt[len(written) :]

    def bound(self, at: int, but: int | None) -> int:
        """Where another message's text begins. That of message `but` may be empty and begin here too."""
        begins = (self.begins(index) for index in range(self.count) if index != but)
        return min((place for place in begins if place is not None and place >= at), default=len(self.text))

    def stop(self, span: Span, index: int | None) -> int:
        """Some families end a turn with the token that begins the next: where it stops the model, it is learnt."""
        end = span[1]
        if self.ended(span, index):
            return end
        match = self.tokenizer.stop_texts.match(self.text, end, self.bound(end, index))
        return end if match is None else match.end()

    def ended(self, span: Span, index: int | None) -> bool:
        """Whether a special token of the template ends a turn: what message `index` says may look like one."""
        start, end = span
        rest = None if index is None else self.behind(index, self.count)
        at = start if rest is None else len(self.text) - len(rest)
        written = self.text[at if start <= at <= end else start : end]
        return written.rstrip().endswith(tuple(self.tokenizer.marks.values()))


def ending(marks: re.Pattern[str], window: str, tail: str, whole: bool) -> int | None:
    """How much of `window` ends a turn that is followed by `tail` when it stands last. `whole`: all must agree."""
    common = len(commonprefix([window, tail]))
    ends = [mark.end() for mark in marks.finditer(window) if mark.end() <= common]
    if common < len(tail):
        return ends[-1] if ends and not whole else None
    return ends[-1] if ends and not window[ends[-1] : common].strip() else common
