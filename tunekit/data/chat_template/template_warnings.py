"""Warnings about rendered conversations: content that the template drops, and special tokens in message texts."""

import json
from collections.abc import Sequence
from functools import lru_cache

from tunekit.data.chat_template.messages import REASONING_KEYS, Conversation, Message
from tunekit.data.document import DocFlags
from tunekit.data.tokenizer import Tokenizer


def find_doc_flags(tokenizer: Tokenizer, conversation: Conversation, text: str, turns: Sequence[int]) -> DocFlags:
    """Return flags for messages that are missing in the rendered text, or that contain special tokens."""
    flags, search_start = DocFlags(0), 0
    if conversation.tools and not any(tool_name(tool) in text for tool in conversation.tools):
        flags |= DocFlags.TOOLS_NOT_RENDERED
    for index, message in enumerate(conversation.messages):
        content = message.get("content")
        if content:
            position = text.find(content.strip(), search_start)
            if position < 0:
                flags |= flag_missing_content(message, content, text)
            else:
                search_start = position + len(content.strip())
            if message["role"] != "assistant" and has_special_text(tokenizer, content):
                flags |= DocFlags.SPECIAL_IN_TEXT
        if len(message) > 2:
            flags |= flag_calls_and_reasoning(message, text, index in turns)
        if index in turns and not (content and content.strip()) and "tool_calls" not in message:
            flags |= DocFlags.EMPTY_TURN
    return flags


def flag_calls_and_reasoning(message: Message, text: str, is_target: bool) -> DocFlags:
    """Return flags for tool calls and reasoning that are not rendered."""
    flags = DocFlags(0)
    if not all(call["function"]["name"] in text for call in message.get("tool_calls", ())):
        flags |= DocFlags.TOOLS_NOT_RENDERED
    reasoning = next((message[name] for name in REASONING_KEYS if name in message), "")
    if is_target and reasoning.strip() not in text:
        flags |= DocFlags.REASONING_DROPPED
    return flags


def flag_missing_content(message: Message, content: str, text: str) -> DocFlags:
    """Return a flag for content that is not rendered. Templates may write tool results as JSON or remove reasoning."""
    answer = content.rpartition("</think>")[2].strip()
    if answer in text:
        return DocFlags(0) if content.strip() in text else DocFlags.REASONING_DROPPED
    forms = (json.dumps(answer, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
    return DocFlags(0) if any(form in text for form in forms) else DocFlags.CONTENT_LOST


def tool_name(tool: dict) -> str:
    """Return the name of a tool; a string that no text contains if its schema has none."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else "\0"


def has_special_text(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text contains the text of a special token."""
    may_contain = any(char in text for char in first_chars(tokenizer))  # up to 10 times faster than the pattern
    return may_contain and tokenizer.special_texts.search(text) is not None


@lru_cache(maxsize=8)
def first_chars(tokenizer: Tokenizer) -> set[str]:
    """First characters of all special tokens."""
    return {text[0] for text in tokenizer.special_ids.values() if text}
