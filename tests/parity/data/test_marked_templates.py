"""Tokens, loss masks and parsed calls of templates without generation blocks, against transformers with blocks."""

import random
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.helpers.encode_rows import encode_document
from tests.helpers.loss_masks import render_targets
from tests.helpers.marked_templates import (
    MARKED,
    TOOLS,
    MarkedTemplate,
    adapt,
    call_conversations,
    calling,
    text_conversations,
    write_marked,
)
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import make_conversation
from tunekit.data.chat_template.tool_calls import ToolCallParser
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

CALLING = [name for name, template in MARKED.items() if template.has_calls]
CONCATENATING = [name for name, template in MARKED.items() if template.text_arguments]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Tokenizers of each family, ours and that of transformers."""
    directories = {name: write_marked(tmp_path_factory.mktemp(name), name) for name in MARKED}
    return {name: (Tokenizer.open(path), AutoTokenizer.from_pretrained(path)) for name, path in directories.items()}


def render_in_transformers(
    tokenizer: Any, messages: list[dict], tools: Any, prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """Text of a conversation and the spans of its marked turns; adjacent spans are joined."""
    text = tokenizer.chat_template.replace("{#- target #}", "{%- generation %}")
    text = text.replace("{#- end target #}", "{%- endgeneration %}")
    options: dict[str, Any] = {
        "return_assistant_tokens_mask": True,
        "add_generation_prompt": prompt,
        **tokenizer.special_tokens_map,
    }
    (rendered,), (blocks,) = render_jinja_template([messages], tools, None, text, **options)
    return rendered, join_spans(blocks)


def join_spans(spans: Any) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined += [(start, end)] if end > start else []
    return joined


def target_texts(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[start:end] for start, end in join_spans(spans)]


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("name", MARKED)
def test_tokens_and_turns_equal_those_of_marked_templates(name: str, has_tools: bool, tokenizers: dict) -> None:
    if has_tools and not MARKED[name].has_calls:
        pytest.skip("the template writes no calls")
    (ours, theirs), tools = tokenizers[name], TOOLS if has_tools else None
    for messages in (call_conversations(MARKED[name]) if has_tools else text_conversations()).values():
        adapted = adapt(ours, messages, tools)
        text, spans = render_in_transformers(theirs, adapted, tools)
        rendered = render_targets(ours, adapted, tools)
        assert rendered.text == text
        assert target_texts(text, rendered.spans) == target_texts(text, spans), messages
        document = encode_document(AutoDataset("x"), ours, {"messages": messages, "tools": tools})
        assert document.tokens.tolist() == theirs.encode(text, add_special_tokens=False)
        targets = theirs.decode(document.tokens[document.loss_mask > 0])  # without line breaks that join the prompt's
        assert "".join(targets.split()) == "".join("".join(target_texts(text, spans)).split())


PARTS = (
    "It rains.",
    "",
    " \n",
    "</think>",
    "é😀",
    "<tool_call>",
    "<|user|>",
    "<|im_end|>",
    "[e~[",
    '"}',
    "weather",
    "true",
)
VALUES = (True, False, None, {}, [], 1, -2.5, "x", "", "<|im_end|>", {"a": {}}, [True], [None, "y"])


def draw_conversation(rng: random.Random, template: MarkedTemplate) -> list[dict]:
    """A random conversation with texts that look like parts of templates."""

    def draw_text() -> str:
        return "".join(rng.choices(PARTS, k=rng.choice((1, 1, 2, 3))))

    def draw_arguments() -> dict[str, Any]:
        return {key: rng.choice(VALUES) for key in rng.sample(["city", "on", "more"], rng.choice((0, 0, 1, 2)))}

    messages = []
    for _ in range(rng.choice((1, 2))):
        messages.append({"role": "user", "content": draw_text()})
        for _ in range(rng.choice((0, 1, 2)) * template.has_calls):
            fields = {"content": draw_text()} if template.has_text_with_calls and rng.random() < 0.5 else {}
            fields |= {"reasoning_content": draw_text()} if rng.random() < 0.4 else {}
            turn = calling(*(draw_arguments() for _ in range(rng.randint(1, template.max_calls))), **fields)
            messages += [turn[0], *({**result, "content": draw_text()} for result in turn[1:])]
        messages.append({"role": "assistant", "content": draw_text()})
    return messages


@pytest.mark.parametrize("name", [name for name, template in MARKED.items() if template.has_steps])
def test_turns_are_found_whatever_they_hold(name: str, tokenizers: dict) -> None:
    (ours, theirs), rng = tokenizers[name], random.Random(name)
    tools = TOOLS if MARKED[name].has_calls else None
    for _ in range(8):
        messages = adapt(ours, draw_conversation(rng, MARKED[name]), tools)
        text, spans = render_in_transformers(theirs, messages, tools)
        assert target_texts(text, render_targets(ours, messages, tools).spans) == target_texts(text, spans)


@pytest.mark.parametrize("name", MARKED)
def test_tokens_equal_transformers(name: str, tokenizers: dict) -> None:
    """Rows as they are, and the start of the answer that `generate`, `chat`, `serve` and episodes append."""
    ours, theirs = tokenizers[name]
    rows = [(messages, None) for messages in text_conversations().values()]
    rows += [(messages, TOOLS) for messages in call_conversations(MARKED[name]).values()] * MARKED[name].has_calls
    for messages, tools in rows:
        converted = adapt(ours, messages, tools) if name == "minimax_m1" else messages  # content in parts
        if name == "deepseek_v3_text":  # needs a null, which `apply_chat_template` removes
            expected = theirs.encode(
                render_in_transformers(theirs, converted, tools, True)[0], add_special_tokens=False
            )
        else:
            expected = theirs.apply_chat_template(converted, tools, add_generation_prompt=True, return_dict=False)
        assert encode_conversation(ours, make_conversation(messages, "messages").messages, tools) == expected


@pytest.mark.parametrize("name", CALLING)
def test_arguments_may_be_texts_or_objects(name: str, tokenizers: dict) -> None:
    """Both are rendered as transformers renders the form that the template accepts."""
    ours, theirs = tokenizers[name]
    question, values = {"role": "user", "content": "?"}, {"city": "Tromsø", "on": True, "more": [{}, 1.5]}
    accepted = [question, *calling(values, as_text=MARKED[name].text_arguments)]
    expected, _ = render_in_transformers(theirs, accepted, TOOLS)
    for as_text in (False, True):
        messages = adapt(ours, [question, *calling(values, as_text=as_text)], TOOLS)
        assert ours.render(messages, TOOLS) == expected


@pytest.mark.parametrize("name", CONCATENATING)
@pytest.mark.parametrize("arguments", ['{"city":"Oslo"}', '{ "city": "Troms\\u00f8" }\n', "{}"])
def test_texts_of_arguments_are_written_as_they_are(arguments: str, name: str, tokenizers: dict) -> None:
    ours, theirs = tokenizers[name]
    messages = [{"role": "user", "content": "?"}, *calling({})]
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert adapt(ours, messages, TOOLS)[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert ours.render(adapt(ours, messages, TOOLS), TOOLS) == render_in_transformers(theirs, messages, TOOLS)[0]


@pytest.mark.parametrize("name", CALLING)
def test_written_calls_are_parsed(name: str, tokenizers: dict) -> None:
    ours, parser = tokenizers[name][0], ToolCallParser(tokenizers[name][0], TOOLS)
    conversations = call_conversations(MARKED[name])
    for messages in [rows[1:] for key, rows in conversations.items() if key.endswith(", last")]:
        text, (span,), _ = render_targets(ours, adapt(ours, messages, TOOLS), TOOLS)
        parsed = parser.parse(ours.encode(text[slice(*span)]))
        calls = make_conversation(messages, "messages").messages[-1]["tool_calls"]
        assert [call["function"] for call in parsed.tool_calls] == [call["function"] for call in calls]


def test_ids_of_calls_are_parsed(tokenizers: dict) -> None:
    parser = ToolCallParser(tokenizers["mistral_v11"][0], TOOLS)
    parsed = parser.parse('[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"on": true}</s>')
    assert [(call["id"], call["function"]["arguments"]) for call in parsed.tool_calls] == [("a1B2c3D4e", {"on": True})]


def test_results_within_a_turn_are_never_targets(tokenizers: dict) -> None:
    """Gemma 4 writes the results of calls before the text of the calling answer."""
    messages = [{"role": "user", "content": "?"}, *calling({"on": True}, content="I look.")]
    with pytest.raises(UserError, match=r"messages\[1\]"):
        render_targets(tokenizers["gemma4"][0], adapt(tokenizers["gemma4"][0], messages, TOOLS), TOOLS)
