"""What of a row's messages a template does not write, and what they say that may be taken for the template's."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from tunekit.data.chat_template.messages import REASONING, Conversation, Message
from tunekit.data.doc_flags import DocFlags
from tunekit.data.tokenizer import Tokenizer


def find_doc_flags(tokenizer: Tokenizer, talk: Conversation, text: str, turns: Sequence[int]) -> DocFlags:
    """What of the messages is not in the text, and what of the text may be taken for the template's."""
    found, at = DocFlags(0), 0
    if talk.tools and not any(name_of(tool) in text for tool in talk.tools):
        found |= DocFlags.TOOLS_UNUSED
    for index, message in enumerate(talk.messages):
        content = message.get("content")
        if content:
            place = text.find(content.strip(), at)
            if place < 0:
                found |= lost(message, content, text)
            else:
                at = place + len(content.strip())
            if message["role"] != "assistant" and holds_special(tokenizer, content):
                found |= DocFlags.SPECIAL_IN_TEXT
        if len(message) > 2:
            found |= extras(message, text, index in turns)
        if index in turns and not (content and content.strip()) and "tool_calls" not in message:
            found |= DocFlags.EMPTY_TURN
    return found


def extras(message: Message, text: str, learnt: bool) -> DocFlags:
    """Signs of calls and of reasoning."""
    found = DocFlags(0)
    if not all(call["function"]["name"] in text for call in message.get("tool_calls", ())):
        found |= DocFlags.TOOLS_UNUSED
    reasoning = next((message[name] for name in REASONING if name in message), "")
    if learnt and reasoning.strip() not in text:
        found |= DocFlags.REASONING_DROPPED
    return found


def lost(message: Message, content: str, text: str) -> DocFlags:
    """Content that is not where it should be. A tool's result may be written as JSON; reasoning may be cut out."""
    answer = content.rpartition("</think>")[2].strip()
    if answer in text:
        return DocFlags(0) if content.strip() in text else DocFlags.REASONING_DROPPED
    forms = (json.dumps(answer, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
    return DocFlags(0) if any(form in text for form in forms) else DocFlags.CONTENT_LOST


def name_of(tool: dict) -> str:
    """A tool's name; where a schema has none, what no text holds."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else "\0"


def holds_special(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text holds the text of a special token."""
    first, pattern = specials(tokenizer)
    return any(char in text for char in first) and pattern.search(text) is not None


@lru_cache(maxsize=8)
def specials(tokenizer: Tokenizer) -> tuple[str, re.Pattern[str]]:
    """The characters that special tokens begin with, and a pattern of all of them."""
    texts = sorted(filter(None, tokenizer.marks.values()), key=len, reverse=True)
    return "".join({text[0] for text in texts}), re.compile("|".join(map(re.escape, texts)) or "(?!)")
