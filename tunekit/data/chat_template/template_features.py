"""Message formats that a chat template supports, detected by rendering probes instead of by model family."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tunekit.data.chat_template.messages import REASONING_KEYS, Message, Tools, arguments_text
from tunekit.data.chat_template.template import ChatTemplate
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

QUESTION, ANSWER, TOOL_NAME, EXTRA_KEY = "qaz", "wsx", "edc", "rfv"  # strings that no template contains
KNOWN_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_KEYS})
CALL_ID = "call{:05}"  # some templates require nine characters
ARGUMENTS = {EXTRA_KEY: ANSWER}
EMPTY_CONTENTS: tuple[Message, ...] = ({"content": None}, {"content": ""}, {})  # content of a message with only calls


@dataclass(frozen=True)
class TemplateFeatures:
    """Message formats that a template supports."""

    content_parts: bool = False  # content must be a list of parts
    empty_contents: tuple[bool, ...] = (True, True, True)  # which of EMPTY_CONTENTS are rendered correctly
    text_arguments: bool = False  # arguments of calls must be JSON texts, because the template concatenates them
    renders_call_ids: bool = True  # if not, ids are renumbered, so that more rows have the same shape
    has_developer: bool = True  # if not, developer messages are system messages, which OpenAI renamed
    source: str | None = None  # template text: message keys that do not occur in it are dropped; None: keep all keys

    def adapt_messages(self, messages: list[Message]) -> list[Message]:
        """Convert messages to formats that the template supports."""
        if not self.has_developer:
            messages = [as_system_message(message) for message in messages]
        if not self.content_parts and all(len(message) == 2 for message in messages):
            return messages
        ids: dict[str, str] = {}
        return [self.adapt_message(message, ids) for message in messages]

    def adapt_message(self, message: Message, ids: dict[str, str]) -> Message:
        if len(message) > 2:
            source = self.source
            message = {k: v for k, v in message.items() if k in KNOWN_KEYS or source is None or k in source}
            if "tool_calls" in message and not message.get("content"):
                message = self.with_empty_content(message)
            if not self.renders_call_ids:
                message = renumber_calls(message, ids)
            if self.text_arguments and "tool_calls" in message:
                message = {**message, "tool_calls": [with_text_arguments(call) for call in message["tool_calls"]]}
        content = message.get("content")
        if self.content_parts and (content or content == "" and "tool_calls" not in message):
            message = {**message, "content": to_content_parts(content)}
        return message

    def with_empty_content(self, message: Message) -> Message:
        """Return a message that only calls tools, with a form of empty content that the template supports."""
        content = {"content": message["content"]} if "content" in message else {}
        if self.empty_contents[EMPTY_CONTENTS.index(content)] or not any(self.empty_contents):
            return message
        fields = {key: value for key, value in message.items() if key != "content"}
        return fields | EMPTY_CONTENTS[self.empty_contents.index(True)]


def with_text_arguments(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_text(function["arguments"])}}


def as_system_message(message: Message) -> Message:
    """Return a developer message as a system message, and any other message unchanged."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def to_content_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def renumber_calls(message: Message, ids: dict[str, str]) -> Message:
    """Replace call ids by consecutive ones. Equal ids stay equal."""
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": renumber_id(message["tool_call_id"], ids)}
    if "tool_calls" in message:
        calls = [
            {**call, "id": renumber_id(call["id"], ids)} if "id" in call else call for call in message["tool_calls"]
        ]
        message = {**message, "tool_calls": calls}
    return message


def renumber_id(call_id: str, ids: dict[str, str]) -> str:
    return ids.setdefault(call_id, CALL_ID.format(len(ids)))


@lru_cache(maxsize=16)
def detect_features(template: ChatTemplate, tokenizer: Tokenizer) -> TemplateFeatures:
    """Detect the message formats that a template supports."""
    probe = TemplateProbe(template, tokenizer, str)
    answer = probe.render_answer()
    parts_probe = TemplateProbe(template, tokenizer, to_content_parts)
    if not has_question_and_answer(answer) and has_question_and_answer(parts_probe.render_answer()):
        probe, answer = parts_probe, parts_probe.render_answer()
    has_parts, text_arguments = probe is parts_probe, needs_text_arguments(probe)
    probe = replace(probe, arguments="{}") if text_arguments else probe
    texts = [probe.render_call(empty_content) for empty_content in EMPTY_CONTENTS]
    supported = supported_empty_contents(texts, answer.count("None"))
    empty_content = EMPTY_CONTENTS[supported.index(True)] if True in supported else EMPTY_CONTENTS[0]
    first, second = (probe.render_call(empty_content, CALL_ID.format(number), with_result=True) for number in (1, 2))
    source = "\n".join(text for text, _ in tokenizer.templates.values())
    ignores_unknown_keys = probe.render_answer(EXTRA_KEY) == answer
    renders_call_ids = first != second or not first
    return TemplateFeatures(
        has_parts,
        supported,
        text_arguments,
        renders_call_ids,
        has_developer="developer" in source,
        source=source if ignores_unknown_keys else None,
    )


def needs_text_arguments(probe: "TemplateProbe") -> bool:
    """Whether a template writes the arguments of calls as JSON only if they are texts.

    With objects, it fails, or prints them as Python does.
    """
    forms = [replace(probe, arguments=arguments) for arguments in (ARGUMENTS, json.dumps(ARGUMENTS))]
    with_object, with_text = ([form.render_call(empty) for empty in EMPTY_CONTENTS] for form in forms)
    if any(EXTRA_KEY in text and ANSWER in text and repr(ARGUMENTS) not in text for text in with_object):
        return False
    return any(json.dumps(ARGUMENTS) in text for text in with_text)


def try_render(tokenizer: Tokenizer, messages: list[Message], tools: Tools, prompt: bool = False) -> str:
    """Render messages in formats that the template supports; return an empty string if it fails."""
    try:
        features = detect_features(tokenizer.template(tools), tokenizer)
        return tokenizer.render(features.adapt_messages(messages), tools, prompt)
    except UserError:
        return ""


def supported_empty_contents(texts: list[str], num_nones: int) -> tuple[bool, ...]:
    """Return which forms of empty content are rendered as nothing, and with the tool call if any form is."""
    clean = [bool(text) and text.count("None") <= num_nones for text in texts]
    with_call = [is_clean and TOOL_NAME in text for is_clean, text in zip(clean, texts, strict=True)]
    return tuple(with_call if any(with_call) else clean)


def has_question_and_answer(text: str) -> bool:
    return QUESTION in text and ANSWER in text


@dataclass(frozen=True)
class TemplateProbe:
    """Renders probe conversations. `to_content` converts a string to message content."""

    template: ChatTemplate
    tokenizer: Tokenizer
    to_content: Callable[[str], Any]
    arguments: Any = field(default_factory=dict)  # of calls

    def render_answer(self, extra_key: str | None = None) -> str:
        """Render a question and its answer, optionally with an unknown key."""
        extra = {} if extra_key is None else {extra_key: extra_key}
        return self.try_render([{"role": "assistant", "content": self.to_content(ANSWER), **extra}])

    def render_call(self, empty_content: Message, call_id: str = CALL_ID.format(0), with_result: bool = False) -> str:
        """Render a question and a tool call, optionally with its result and an answer."""
        call = {"type": "function", "id": call_id, "function": {"name": TOOL_NAME, "arguments": self.arguments}}
        result = {"role": "tool", "tool_call_id": call_id, "name": TOOL_NAME, "content": self.to_content(ANSWER)}
        answer = {"role": "assistant", "content": self.to_content(ANSWER)}
        message = {"role": "assistant", **empty_content, "tool_calls": [call]}
        return self.try_render([message, *([result, answer] * with_result)])

    def try_render(self, messages: list[Message]) -> str:
        """Render a question and these messages; return an empty string if the template fails."""
        try:
            question = {"role": "user", "content": self.to_content(QUESTION)}
            return self.template.render(self.tokenizer.template_context([question, *messages]))
        except UserError:
            return ""
