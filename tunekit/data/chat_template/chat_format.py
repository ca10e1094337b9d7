"""The chat format of a config: its template, the values of template variables, and the token that ends a turn."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tunekit.data.chat_template.messages import Message, Tools
from tunekit.data.chat_template.template_features import ANSWER, QUESTION, detect_features, try_render
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

NAME = r"[^\s<>|｜{}'\"]{1,60}"  # of a marker
MARKER = re.compile(rf"<[|｜]{NAME}[|｜]?>|<{NAME}[|｜]>|<(?:start|end)_of_turn>")
ROLE_MARKERS = {f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}


def with_chat_format(tokenizer: Tokenizer, chat_template: str | None, kwargs: Mapping[str, Any]) -> Tokenizer:
    """Copy of a tokenizer with another chat template, and with values of its variables.

    `chat_template` is a name or a file; None keeps that of the tokenizer. Its end-of-turn token ends answers.
    """
    if chat_template is not None:
        tokenizer = tokenizer.with_template(chat_template)
        tokenizer = tokenizer.copy_with(stops=tokenizer.stops | find_end_of_turn(tokenizer))
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in kwargs.items()}
    return tokenizer.copy_with(template_kwargs={**tokenizer.template_kwargs, **values}) if kwargs else tokenizer


def encode_conversation(tokenizer: Tokenizer, messages: list[Message], tools: Tools = None) -> list[int]:
    """Token ids of a conversation, in formats that the template supports, and of the start of the answer."""
    features = detect_features(tokenizer.template(tools), tokenizer)
    return tokenizer.encode_prompt(features.adapt_messages(messages), tools)


def find_end_of_turn(tokenizer: Tokenizer) -> set[int]:
    """Id of the special token that the chat template writes after an answer; empty if there is none."""
    match = tokenizer.special_texts.match(render_turn_end(tokenizer))
    return {token for token, special in tokenizer.special_ids.items() if match and match[0] == special}


def render_turn_end(tokenizer: Tokenizer) -> str:
    """Text that the chat template writes after an answer; empty if it does not render a question and an answer."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    return try_render(tokenizer, messages, None).rpartition(ANSWER)[2].lstrip()


def render_markers(tokenizer: Tokenizer) -> str:
    """Text of a short conversation; empty if the chat template does not render it."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    return try_render(tokenizer, messages, None) or try_render(tokenizer, messages[:1], None, prompt=True)


def find_split_markers(tokenizer: Tokenizer) -> list[str]:
    """Markers in the chat template, such as <|im_start|>, that the tokenizer splits into several tokens."""
    text = tokenizer.templates.get("default", ("", ""))[0]
    markers = dict.fromkeys(match[0] for part in (text, render_markers(tokenizer)) for match in MARKER.finditer(part))
    return [marker for marker in markers if is_split(tokenizer, marker)]


def is_split(tokenizer: Tokenizer, marker: str) -> bool:
    """Whether a marker is not one token, also if the vocabulary has it: texts are split before they are looked up."""
    try:
        return len(tokenizer.encode_texts([marker])[0]) != 1
    except UserError:  # the tokenizer has no token for an unknown character
        return True


def find_doubtful_markers(tokenizer: Tokenizer, markers: Sequence[str]) -> list[str]:
    """The split markers of every conversation, except names of roles where a special token ends the turns.

    Zephyr and OLMo 2 were trained on such names as plain text.
    """
    text, ends_turns = render_markers(tokenizer), bool(find_end_of_turn(tokenizer))
    return [marker for marker in markers if marker in text and not (ends_turns and marker in ROLE_MARKERS)]


def advise_on_markers(tokenizer: Tokenizer, markers: Sequence[str]) -> str:
    """Remedy for split markers. New tokens are not proposed if they could get ids of trained rows."""
    if tokenizer.vocab_size is not None and tokenizer.size < tokenizer.vocab_size:
        files = "tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json"
        sizes = f"the model has {tokenizer.vocab_size} embeddings, its tokenizer only {tokenizer.size} tokens"
        return f"If its tokenizer files are incomplete ({sizes}), download {files}"
    return f"Add them with new_special_tokens={json.dumps([*markers])}"


def describe_split_markers(tokenizer: Tokenizer) -> str:
    """Warning about markers of every conversation that are split; empty without any."""
    markers = find_doubtful_markers(tokenizer, find_split_markers(tokenizer))
    names = " and ".join(markers)
    return f"the chat template writes {names}, which the tokenizer splits into several tokens" if markers else ""


def check_turn_end(tokenizer: Tokenizer) -> None:
    """Raise UserError if a chat template ends answers with a marker that is not a token of the tokenizer."""
    end, markers = render_turn_end(tokenizer), find_split_markers(tokenizer)
    if marker := next(filter(end.startswith, markers), None):
        raise UserError(
            f"data.chat_template: answers end with {marker}, which the tokenizer splits into several tokens, so "
            f"generation would not stop. {advise_on_markers(tokenizer, markers)}, or set data_checks=warn."
        )


def describe_unread_kwargs(tokenizer: Tokenizer) -> str:
    """Warning about names in `template_kwargs` that the chat template does not read; empty without any."""
    names = ", ".join(name for name in tokenizer.template_kwargs if name not in tokenizer.template().variables)
    return f"chat_template_kwargs: the chat template does not read {names}" if names else ""
