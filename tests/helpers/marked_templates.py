"""Chat templates whose turns are marked by comments, from `{#- target #}` to `{#- end target #}`, and conversations.

With `{% generation %}` instead of the comments, transformers computes the loss masks that tunekit must find without.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.chat_families import (
    COMMAND,
    DEEPSEEK,
    GLM,
    HARMONY,
    IM,
    MISTRAL,
    TEMPLATE_DIR,
    THINK,
    Family,
    write_template_family,
)
from tunekit.data.chat_template.messages import make_conversation
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.tokenizer import Tokenizer

KIMI = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "[EOS]") + tuple(
    f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
)
MINIMAX = ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>")
ACTIONS = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>")
GEMMA4 = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
          "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>")  # fmt: skip
LLAMA4 = ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>")
MISTRAL11 = (*MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]")
M1 = ("<begin_of_document>", "<beginning_of_sentence>", "<end_of_sentence>")


@dataclass(frozen=True)
class MarkedTemplate:
    """Tokens of a family, and what its template supports."""

    special: tuple[str, ...]
    bos: str | None
    eos: str
    plain: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    has_calls: bool = True
    max_calls: int = 2
    has_text_with_calls: bool = True
    has_steps: bool = True  # an answer after a result may call again
    text_arguments: bool = False  # the template concatenates arguments


MARKED = {
    "qwen2": MarkedTemplate(IM, None, "<|im_end|>"),
    "qwen3": MarkedTemplate(IM, None, "<|im_end|>", THINK),
    "qwen35": MarkedTemplate(IM, None, "<|im_end|>", THINK),
    "qwen3_coder": MarkedTemplate(IM, None, "<|im_end|>", THINK[2:]),
    "deepseek_v3_text": MarkedTemplate(
        DEEPSEEK, DEEPSEEK[0], DEEPSEEK[1], THINK[:2], has_text_with_calls=False, has_steps=False, text_arguments=True
    ),
    "deepseek_v31": MarkedTemplate(DEEPSEEK, DEEPSEEK[0], DEEPSEEK[1], THINK[:2], text_arguments=True),
    "kimi_k2": MarkedTemplate(KIMI, None, "[EOS]", stops=("<|im_end|>",)),
    "kimi_k2_thinking": MarkedTemplate(KIMI, None, "[EOS]", THINK[:2], ("<|im_end|>",)),
    "minimax_m1": MarkedTemplate(M1, None, "<end_of_sentence>", has_calls=False),
    "minimax_m2": MarkedTemplate(MINIMAX, None, "[e~[", THINK[:2]),
    "glm45": MarkedTemplate(GLM, None, "<|endoftext|>", THINK, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "command_a": MarkedTemplate((*COMMAND, *ACTIONS), COMMAND[0], "<|END_OF_TURN_TOKEN|>"),
    "gpt_oss": MarkedTemplate(HARMONY, None, "<|return|>", stops=("<|return|>", "<|call|>"), max_calls=1),
    "gemma4": MarkedTemplate(
        GEMMA4, "<bos>", "<eos>", stops=("<eos>", "<turn|>", "<|tool_response>"), has_text_with_calls=False
    ),
    "llama4": MarkedTemplate(LLAMA4, LLAMA4[0], "<|eot|>"),
    "mistral_v11": MarkedTemplate(MISTRAL11, "<s>", "</s>"),
}
QUESTION, FOLLOW_UP = {"role": "user", "content": "Weather?"}, {"role": "user", "content": "And in Rome, é 😀?"}
ANSWER = {"role": "assistant", "content": "It rains."}
SYSTEM = {"role": "system", "content": "Be brief."}
PROPERTIES = {"city": {"type": "string"}, "on": {"type": "boolean"}, "days": {"type": "integer"}, "more": {}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("weather", "get_tides")
]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "text": {"city": "Tromsø"},
    "none": {},
    "boolean": {"on": True},
    "number": {"days": 3},
    "empty": {"more": [{}, []]},
    "mixed": {"city": "", "on": False, "more": {"a": [None, True]}},
}


def calling(*arguments: dict[str, Any], as_text: bool = False, **fields: Any) -> list[dict[str, Any]]:
    """An answer that calls tools, and their results."""
    names = ("weather", "get_tides")
    ids = [f"functions.{name}:{index}" for index, name in enumerate(names)]
    calls = [
        {
            "type": "function",
            "id": call_id,
            "function": {"name": name, "arguments": json.dumps(values, ensure_ascii=False) if as_text else values},
        }
        for call_id, name, values in zip(ids, names, arguments, strict=False)
    ]
    results = [
        {"role": "tool", "content": "Rain.", "tool_call_id": call_id, "name": name}
        for call_id, name, _ in zip(ids, names, arguments, strict=False)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": calls, **fields}, *results]


def text_conversations() -> dict[str, list[dict[str, Any]]]:
    """Conversations without calls, by what their first answer holds."""
    contents = ("It rains.", "", " \n", "Weather?", "naïve 你好 😀", "</think>", "<think>\n</think>")
    answers = {repr(content): {"role": "assistant", "content": content} for content in contents}
    answers["reasoning"] = {**ANSWER, "reasoning_content": "Hm."}
    answers["only reasoning"] = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    rows = {f"{name}, {len(rest)} follow": [QUESTION, answer, *rest]
            for name, answer in answers.items() for rest in ([], [FOLLOW_UP, ANSWER])}  # fmt: skip
    return rows | {"system": [SYSTEM, QUESTION, ANSWER], "repeated": [QUESTION, ANSWER, QUESTION, ANSWER]}


def call_conversations(template: MarkedTemplate) -> dict[str, list[dict[str, Any]]]:
    """Conversations with calls, by what the calling answer holds."""
    as_text, text = template.text_arguments, {"content": "I look."}
    turns = {name: calling(values, as_text=as_text) for name, values in ARGUMENTS.items()}
    turns["reasoning"] = calling({}, as_text=as_text, reasoning_content="Hm.")
    if template.has_text_with_calls:
        turns["text and call"] = calling({}, as_text=as_text, **text)
        turns["all"] = calling({"on": True}, as_text=as_text, **text, reasoning_content="Hm.")
    if template.max_calls > 1:
        turns["parallel"] = calling({}, {"on": True}, as_text=as_text)
        turns["parallel texts"] = calling({"city": "Oslo"}, {}, as_text=as_text)
    more_calls = turns["none"] if template.has_steps else []
    rows = {
        f"{name}, {len(rest)} follow": [QUESTION, *turn, *rest]
        for name, turn in turns.items()
        for rest in ([ANSWER], [ANSWER, FOLLOW_UP, *more_calls, ANSWER])
    }
    rows |= {f"{name}, last": [SYSTEM, QUESTION, turn[0]] for name, turn in turns.items()}
    steps = [QUESTION, *turns["none"], *turns["boolean"], *turns["text"], ANSWER]
    return rows | ({"steps": steps} if template.has_steps else {})


def write_marked(directory: Path, name: str) -> Path:
    """Write the tokenizer directory of a family, without generation blocks."""
    template = MARKED[name]
    family = Family(template.special, template.bos, template.eos, plain=template.plain, stops=template.stops)
    return write_template_family(directory, family, (TEMPLATE_DIR / f"{name}.jinja").read_text(encoding="utf-8"))


def adapt(tokenizer: Tokenizer, messages: list[dict], tools: Any) -> list[dict]:
    """Messages as in training."""
    conversation = make_conversation(messages, "messages")
    return detect_features(tokenizer.template(tools), tokenizer).adapt_messages(conversation.messages)


def open_marked(directory: Path, name: str) -> Tokenizer:
    return Tokenizer.open(write_marked(directory, name))
