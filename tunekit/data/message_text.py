"""Detect text that is a serialized conversation, such as a message as JSON, which no model should be trained to write.

Other JSON is legitimate text: answers may be JSON objects. A message has a known role next to its content.
"""

import json
import re
from typing import Any

from tunekit.data.chat_template.converters import SPEAKER_ROLES
from tunekit.data.chat_template.messages import ROLES

SPEAKERS = {*ROLES, *SPEAKER_ROLES, "function", "bot", "ipython"}
PART_TYPES = {"text", "input_text", "output_text", "image", "image_url", "input_image", "input_audio", "audio", "video"}
MAX_DEPTH = 4  # of objects around a message: {"choices": [{"message": {...}}]}
# Python writes a list of dictionaries like this, and pandas stores it in CSV files.
PYTHON_MESSAGES = re.compile(r"\[?\s*\{.*?'(?:role|from)'\s*:\s*['\"](\w+)['\"]", re.DOTALL)


def is_message_text(text: str) -> bool:
    """Whether a text is a message, a list of messages or of content parts, or an object with some: as JSON or Python"""
    text = text.strip()
    if not text.startswith(("{", "[")) or not ("role" in text or "from" in text or "type" in text):
        return False
    try:
        return has_messages(json.loads(text))
    except (ValueError, RecursionError):
        match = PYTHON_MESSAGES.match(text)
        return match is not None and match[1] in SPEAKERS and text.endswith(("}", "]"))


def has_messages(value: Any, depth: int = 0) -> bool:
    """Whether a JSON value is or contains a message, or is a list of content parts."""
    if depth > MAX_DEPTH or not isinstance(value, dict | list):
        return False
    if isinstance(value, list):
        is_parts = bool(value) and all(isinstance(item, dict) and is_content_part(item) for item in value)
        return is_parts or any(has_messages(item, depth + 1) for item in value)
    return is_message(value) or any(has_messages(item, depth + 1) for item in value.values())


def is_message(item: dict[str, Any]) -> bool:
    """Whether an object is a message in the format of OpenAI or of ShareGPT."""
    if item.keys() & {"content", "tool_calls", "function_call"} and item.get("role") in SPEAKERS:
        return True
    return "value" in item and item.get("from") in SPEAKERS


def is_content_part(item: dict[str, Any]) -> bool:
    """Whether an object is a part of the content of a message: its type, and a text or another content."""
    return item.get("type") in PART_TYPES and len(item) > 1 and item["type"].removeprefix("input_") in item
