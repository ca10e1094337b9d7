"""Boundaries of turns in the output of any chat template, found by rendering.

Message texts are replaced by sentinel characters that occur nowhere else; everything around them is the template's own
text. A turn starts where its generation prompt ends, and ends with the text that the template writes after its content.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from os.path import commonprefix
from typing import Any, Literal

from tunekit.data.chat_template.messages import REASONING_KEYS, Messages, Tools
from tunekit.data.tokenizer import SIMPLE_KEYS, Tokenizer
from tunekit.errors import UserError

Span = tuple[int, int]
Mode = tuple[str, bool]  # a template variable and its value, such as ("enable_thinking", False)
# What is replaced in a message to find it: its texts; the name or the id of its first call, whose arguments may have no
# texts; or all of its content, which may be empty or consist of tags.
Marks = Literal["texts", "name", "id", "content"]
MARKS: tuple[Marks, ...] = ("texts", "name", "id", "content")
SENTINEL_BASE = 0x17000  # first sentinel character: Tangut script, because `repr` does not escape it
MAX_SENTINELS = 6000
MARK, ANSWER_MARK = map(chr, range(SENTINEL_BASE + MAX_SENTINELS, SENTINEL_BASE + MAX_SENTINELS + 2))
RESERVED = re.compile(f"[{chr(SENTINEL_BASE)}-{ANSWER_MARK}]")
SENTINELS = re.compile(f"([{chr(SENTINEL_BASE)}-{chr(SENTINEL_BASE + MAX_SENTINELS - 1)}])\\1*")
SENTINEL_NUMBER = 7310584926_000_000  # first sentinel of numbers, because a string would be quoted in JSON
SENTINEL_NUMBERS = re.compile(r"7310584926(\d{6})")
MASK_HINT = "Exclude this turn (`train_on: last`), or set a `chat_template` with {% generation %} blocks."


class AmbiguousMaskError(UserError):
    """The loss mask of a turn cannot be determined."""


class SentinelMessages:
    """Messages whose texts are replaced by sentinels; `texts[i]` is the text of sentinel i.

    Tags that occur in the template, such as `<think>`, are not replaced: the template may search for them.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Messages, tools: Tools) -> None:
        self.texts: list[str] = []
        self.template = tokenizer.template(tools)
        self.messages: list[Mapping[str, Any]] = []
        self.ranges: list[Span] = []  # sentinels of each message
        for message in messages:
            first = len(self.texts)
            self.messages.append(self.hide_message(message))
            self.ranges.append((first, len(self.texts)))
        self.name_sentinels: dict[str, str] = {}
        self.shape = [self.hide_names(message) for message in self.messages]

    def hide_names(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace names and call ids too: templates may write them with another message."""
        if message.keys() == SIMPLE_KEYS:
            return message
        fields = dict(message)
        for key in {"name", "tool_call_id"} & fields.keys():
            fields[key] = self.hide_name(fields[key])
        if fields.get("tool_calls"):
            fields["tool_calls"] = [self.hide_call_names(call) for call in fields["tool_calls"]]
        return fields

    def hide_call_names(self, call: Mapping[str, Any]) -> dict[str, Any]:
        call_id = {"id": self.hide_name(call["id"])} if "id" in call else {}
        function = call["function"]
        return {**call, **call_id, "function": {**function, "name": self.hide_name(function["name"])}}

    def hide_name(self, text: Any) -> Any:
        """Replace a name by a sentinel, repeated to the same length: some templates check the length of ids."""
        if not isinstance(text, str) or not text:
            return text
        if text not in self.name_sentinels:
            self.name_sentinels[text] = self.add_sentinel(text) * len(text)
        return self.name_sentinels[text]

    def hide_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message.keys() == SIMPLE_KEYS and isinstance(message["content"], str):
            return {**message, "content": self.hide_text(message["content"])}
        fields = dict(message)
        for key in ("content", *REASONING_KEYS):
            # An empty text is replaced only if the message has nothing else: with tool calls, a template may skip it.
            if key in fields and (fields[key] != "" or len(fields) == 2):
                fields[key] = self.hide_content(fields[key])
        if fields.get("tool_calls"):
            fields["tool_calls"] = [self.hide_call(call) for call in fields["tool_calls"]]
        return fields

    def hide_content(self, value: Any) -> Any:
        """Replace a string, or the texts of content parts."""
        if not isinstance(value, list):
            return self.hide_text(value)
        return [{**part, "text": self.hide_text(part["text"])} if "text" in part else part for part in value]

    def hide_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", {})
        return {**call, "function": {**function, "arguments": self.hide_json(function.get("arguments"))}}

    def hide_json(self, value: Any) -> Any:
        """Replace the strings and numbers of a JSON value, but not its keys."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.texts.append(json.dumps(value))
            return SENTINEL_NUMBER + len(self.texts) - 1
        if isinstance(value, Mapping):
            return {key: self.hide_json(item) for key, item in value.items()}
        return [self.hide_json(item) for item in value] if isinstance(value, list) else self.hide_text(value)

    def hide_text(self, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        if not any(tag in text for tag in self.template.tags):
            return self.add_sentinel(text)
        parts = self.template.tag_pattern.split(text)
        return "".join(
            self.add_sentinel(part) if index % 2 == 0 and part.strip() else part for index, part in enumerate(parts)
        )

    def add_sentinel(self, text: str) -> str:
        self.texts.append(text)
        return chr(SENTINEL_BASE + len(self.texts) - 1)


def reveal_text(text: str) -> str:
    """Replace sentinel numbers in a rendered text by sentinel characters."""
    return SENTINEL_NUMBERS.sub(lambda match: chr(SENTINEL_BASE + int(match[1])), text)


class RenderedPrefixes:
    """Cached renderings of a conversation and its prefixes, optionally with marks in one message."""

    def __init__(self, tokenizer: Tokenizer, messages: Messages, tools: Tools, sentinels: SentinelMessages) -> None:
        """`messages` are the original messages, or `sentinels.shape` to replace all texts."""
        self.tokenizer, self.messages, self.tools, self.sentinels = tokenizer, messages, tools, sentinels
        self.cache: dict[tuple[Any, ...], str] = {}
        self.text_starts: dict[int, int | None] = {}
        self.count = len(messages)
        self.has_parts = any(isinstance(message.get("content"), list) for message in messages)
        self.text = self.render(self.count)

    def render(
        self, count: int, prompt: bool = False, mode: Mode | None = None, marked: tuple[int, Marks] | None = None
    ) -> str:
        """Render the first `count` messages, with a variable set, and with marks in one message."""
        key = (count, prompt, mode, marked)
        if key not in self.cache:
            messages = list(self.messages[:count])
            if marked is not None:
                messages[marked[0]] = self.marked_message(*marked)
            self.cache[key] = self.render_messages(messages, prompt, mode, marked is not None and marked[1] == "texts")
        return self.cache[key]

    def render_messages(self, messages: Messages, prompt: bool, mode: Mode | None, has_sentinels: bool) -> str:
        variables = {} if mode is None else dict([mode])
        context = self.tokenizer.template_context(messages, self.tools, prompt)
        text = self.tokenizer.template(self.tools).render({**context, **variables})
        return reveal_text(text) if has_sentinels or self.messages is self.sentinels.shape else text

    def marked_message(self, index: int, marks: Marks) -> Mapping[str, Any]:
        """Return message `index` with marks; unchanged if it has nothing to mark."""
        message = self.messages[index]
        if marks == "texts":
            return message if self.messages is self.sentinels.shape else self.sentinels.messages[index]
        if marks == "content":
            fields = {key: value for key, value in message.items() if key != "tool_calls"}
            return {**fields, "content": self.to_content(MARK)}
        if not message.get("tool_calls"):
            return message
        call, *others = message["tool_calls"]
        hidden = MARK * len(self.marked_text(index, marks))
        marked = {"id": hidden} if marks == "id" else {"function": {**call["function"], "name": hidden}}
        return {**message, "tool_calls": [{**call, **marked}, *others]}

    def marked_text(self, index: int, marks: Marks) -> str:
        """Return the text of a message that MARK replaces, repeated to its length."""
        if marks == "content" or not self.messages[index].get("tool_calls"):
            return " "
        call = self.messages[index]["tool_calls"][0]
        return call["function"]["name"] if marks == "name" else call.get("id", "") or " "

    def to_content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.has_parts else text

    def split_at_marks(self, text: str, index: int, marks: Marks) -> tuple[str, str] | None:
        """Return the text before and after the marks of message `index`; None without marks.

        A name is marked in full, and restored after its first place: templates write it again with the tool's result.
        """
        if marks == "texts":
            low, high = self.sentinels.ranges[index]
            spans = [match.span() for match in SENTINELS.finditer(text) if low <= ord(match[1]) - SENTINEL_BASE < high]
            return (text[: spans[0][0]], text[spans[-1][1] :]) if spans else None
        hidden = self.marked_text(index, marks)
        before, mark, after = text.partition(MARK * len(hidden))
        return (before, after.replace(mark, hidden)) if mark else None

    def surroundings(
        self, index: int, count: int, marks: Marks, prompt: bool = False, mode: Mode | None = None
    ) -> tuple[str, str] | None:
        """Return the rendered text before and after the marked part of a message; None if marks change it."""
        text = self.try_render(lambda: self.render(count, prompt, mode, (index, marks)))
        parts = None if text is None else self.split_at_marks(text, index, marks)
        unmarked = self.try_render(lambda: self.render(count, prompt, mode))
        if parts is None or unmarked is None:
            return None
        before, after = parts
        for head, tail in [parts, *([(before.rstrip(), after.lstrip())] if marks == "content" else [])]:
            is_clear = len(head) + len(tail) <= len(unmarked)
            if is_clear and unmarked.startswith(head) and unmarked.endswith(tail):
                return head, tail
        return None

    def text_start(self, index: int) -> int | None:
        """Return the position where the texts of a message start; None if it is ambiguous."""
        if index not in self.text_starts:
            candidates = (self.surroundings(index, self.count, marks) for marks in MARKS)
            self.text_starts[index] = next((len(parts[0]) for parts in candidates if parts is not None), None)
        return self.text_starts[index]

    def text_end(self, index: int) -> int | None:
        """Return the position where only text of the template, or a call, follows in a message; None if ambiguous."""
        candidates = (self.surroundings(index, self.count, marks) for marks in ("content", *MARKS))
        return next((len(self.text) - len(parts[1]) for parts in candidates if parts is not None), None)

    def text_after(
        self, index: int, count: int, marks: Marks, prompt: bool = False, mode: Mode | None = None
    ) -> str | None:
        """Return the rendered text after the marked part of a message; None if it is ambiguous."""
        parts = self.surroundings(index, count, marks, prompt, mode)
        return None if parts is None else parts[1]

    def try_render(self, render: Callable[[], str]) -> str | None:
        """Return None if the template raises an error."""
        try:
            return render()
        except UserError:
            return None

    def turn_span(self, index: int) -> Span:
        """Return the characters of a target message: for an assistant, everything after its generation prompt."""
        start = self.turn_start(index) if self.messages[index]["role"] == "assistant" else self.text_start(index)
        if start is None:
            raise AmbiguousMaskError(f"messages[{index}]: no target tokens: the chat template modifies its content")
        end = self.turn_end(index, start)
        if self.next_text_start(start, index) < end:
            raise AmbiguousMaskError(
                f"messages[{index}]: ambiguous loss mask: the chat template writes another message within this turn. "
                f"{MASK_HINT}"
            )
        return start, end

    def turn_start(self, index: int) -> int:
        """Return the position where the generation prompt of an assistant turn ends."""
        try:
            prompt = self.render(index, True)
        except UserError as error:
            raise AmbiguousMaskError(
                f"messages[{index}]: ambiguous loss mask: no generation prompt for this turn ({error}). {MASK_HINT}"
            ) from None
        if self.text.startswith(prompt):
            return len(prompt)
        # Earlier messages are rendered differently when this turn follows. The text after the last earlier message
        # must still start with the prompt.
        for previous in reversed(range(index)):
            is_rendered = False
            for marks in MARKS:
                prompt_tail = self.text_after(previous, index, marks, True)
                text_tail = self.text_after(previous, self.count, marks)
                if prompt_tail is not None and text_tail is not None:
                    is_rendered = True
                    size = self.prompt_length(index, (previous, marks), prompt_tail, text_tail)
                    if size is not None:
                        return len(self.text) - len(text_tail) + size
            if is_rendered:
                break
        raise AmbiguousMaskError(
            f"messages[{index}]: ambiguous loss mask: the chat template renders the earlier messages differently in "
            f"the prompt for this turn. {MASK_HINT}"
        )

    def prompt_length(self, index: int, previous: tuple[int, Marks], prompt_tail: str, text_tail: str) -> int | None:
        """Return the length of the prompt in `text_tail`, the text after the previous message; None if ambiguous.

        `prompt_tail` is the same text when the template prompts for the turn. Candidates, in order: the full prompt, as
        is or with a template variable set; a prefix of the prompt that is followed by the turn's content; and the text
        up to the generation prompt, if that occurs exactly once before the turn's content.
        """
        start = self.text_start(index)
        head = "" if start is None else text_tail[: start - (len(self.text) - len(text_tail))]
        num_common = len(commonprefix([prompt_tail, text_tail]))
        mode_prompts = (prompt for prompt in self.mode_prompts(index, *previous) if len(prompt) >= num_common)
        headers = chain([head], self.turn_headers(index, *previous))
        prefixes = (prefix for prefix in headers if prefix and prompt_tail.startswith(prefix))
        candidates = chain([prompt_tail], mode_prompts, prefixes)
        match = next((prompt for prompt in candidates if text_tail.startswith(prompt)), None)
        if match is not None:
            return len(match)
        suffix = self.generation_prompt(index)
        if suffix is None or head.count(suffix) != 1 or not self.tokenizer.special_texts.search(suffix):
            return None
        return head.index(suffix) + len(suffix)

    def mode_prompts(self, index: int, previous: int, marks: Marks) -> Iterator[str]:
        """Yield the prompt with each unset template variable set to False and to True."""
        template = self.tokenizer.template(self.tools)
        for name in template.unset_variables:
            for value in (False, True):
                tail = self.text_after(previous, index, marks, True, (name, value))
                if tail is not None:
                    yield tail

    def turn_headers(self, index: int, previous: int, marks: Marks) -> Iterator[str]:
        """Yield the text between the previous message and message `index`, replaced by a plain assistant message."""
        answer = {"role": "assistant", "content": self.to_content(ANSWER_MARK)}
        for following in (self.messages[index + 1 :], ()):
            messages = [*self.messages[:index], answer, *following]
            messages[previous] = self.marked_message(previous, marks)
            text = self.try_render(
                lambda messages=messages: self.render_messages(messages, False, None, marks == "texts")
            )
            parts = self.split_at_marks(text or "", previous, marks)
            if parts is not None and parts[1].count(ANSWER_MARK) == 1:
                yield parts[1].partition(ANSWER_MARK)[0]

    def turn_end(self, index: int, start: int) -> int:
        """Return the position where a turn ends: after the last special token that follows its content."""
        for marks in (*MARKS, None):
            text_tail = None if marks is None else self.text_after(index, self.count, marks)
            if marks is not None and text_tail is None:
                continue
            window_start = start if text_tail is None else len(self.text) - len(text_tail)
            window_end = self.next_text_start(window_start if text_tail is not None else start + 1, index)
            window = self.text[window_start:window_end]
            tails = [*self.turn_tails(index, marks, self.text[:start])]
            for exact, tail in [*((True, tail) for tail in tails), *((False, tail) for tail in tails if marks)]:
                end = find_ending(self.tokenizer.special_texts, window, tail, exact)
                if end is not None:
                    return self.end_with_stop_token((start, window_start + end), index)
        raise AmbiguousMaskError(
            f"messages[{index}]: ambiguous loss mask: the chat template renders the end of this turn differently when "
            f"messages follow. {MASK_HINT}"
        )

    def turn_tails(self, index: int, marks: Marks | None, before: str) -> Iterator[str]:
        """Yield the text after a turn when it is the last one, without and with a generation prompt.

        It starts after the marks of the message; without marks, after the text `before` the turn.
        """
        for prompt in (False, True):
            text = self.try_render(lambda prompt=prompt: self.render(index + 1, prompt))
            tail = None
            if text is not None and marks == "content":  # the text before it may change: reasoning in the content
                marked = self.try_render(lambda prompt=prompt: self.render(index + 1, prompt, None, (index, marks)))
                tail = (marked or "").partition(MARK)[2]
                tail = tail if marked and text.endswith(tail) else None
            elif text is not None and marks is not None:
                tail = self.text_after(index, index + 1, marks, prompt)
            elif text is not None and text.startswith(before):
                tail = text[len(before) :]
            generation_prompt = self.generation_prompt(index) if prompt else ""
            if tail is not None and generation_prompt is not None and tail.endswith(generation_prompt):
                yield tail[: len(tail) - len(generation_prompt)]

    def generation_prompt(self, index: int) -> str | None:
        """Return the text that add_generation_prompt adds; None if it changes more than the end."""
        text = self.try_render(lambda: self.render(index))
        prompt = self.try_render(lambda: self.render(index, True))
        if text is None or prompt is None or not prompt.startswith(text) or text == prompt:
            return None
        return prompt[len(text) :]

    def next_text_start(self, position: int, excluded: int | None) -> int:
        """Return the next position where the content of a message starts, except for message `excluded`."""
        starts = (self.text_start(index) for index in range(self.count) if index != excluded)
        return min((start for start in starts if start is not None and start >= position), default=len(self.text))

    def end_with_stop_token(self, span: Span, index: int | None) -> int:
        """Extend a span by a stop token that follows it: in some templates it is the first token of the next turn."""
        end = span[1]
        stops = tuple(
            self.tokenizer.special_ids[token] for token in self.tokenizer.stops & self.tokenizer.special_ids.keys()
        )
        if self.ending(span, index).endswith(stops):
            return end
        match = self.tokenizer.stop_texts.match(self.text, end, self.next_text_start(end, index))
        return end if match is None else match.end()

    def is_ended(self, span: Span, index: int | None) -> bool:
        """Whether a turn ends with a special token of the template."""
        return self.ending(span, index).endswith(tuple(self.tokenizer.special_ids.values()))

    def ending(self, span: Span, index: int | None) -> str:
        """Return the end of a turn, without the content of message `index`, which may contain special tokens."""
        start, end = span
        tail_start = None if index is None else self.text_end(index)
        return self.text[tail_start if tail_start is not None and start <= tail_start <= end else start : end].rstrip()


def find_ending(special_pattern: re.Pattern[str], window: str, tail: str, exact: bool) -> int | None:
    """Return how many characters of `window` end a turn; None if unknown.

    `tail` is the text that follows the turn when it is the last one. `exact`: the window must start with all of it.
    """
    common = len(commonprefix([window, tail]))
    ends = [match.end() for match in special_pattern.finditer(window) if match.end() <= common]
    if common < len(tail):
        return ends[-1] if ends and not exact else None
    return ends[-1] if ends and not window[ends[-1] : common].strip() else common
