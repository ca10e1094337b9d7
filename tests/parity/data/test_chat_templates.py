"""Chat templates of model families: token ids equal transformers', and loss masks equal the expected target text."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.helpers.chat_families import AMBIGUOUS, CALL, FAMILIES, Family, read_family_template, write_family
from tests.helpers.loss_masks import render_targets, target_texts
from tunekit.data.chat_template.loss_mask import find_target_spans, get_span_pattern
from tunekit.data.chat_template.template import TAG
from tunekit.data.chat_template.turn_boundaries import SENTINELS, RenderedPrefixes, SentinelMessages
from tunekit.data.document import DocFlags
from tunekit.data.readers.row_reader import Row
from tunekit.data.reward_datasets import StepwiseDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4. 😀"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "naïve\n\n  café 你好"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {}}}]
CALLED = {"type": "function", "id": "abcdefghi", "function": json.loads(CALL)}
TOOL_CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "Rain.", "name": "weather", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It rains."},
]
THOUGHTFUL = [
    {**message, "reasoning_content": "By heart."} if index % 2 else message
    for index, message in enumerate(CONVERSATION)
]
TOKENIZERS: dict[str, Tokenizer] = {}


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_family(tmp_path_factory.mktemp(name), name) for name in (*FAMILIES, *AMBIGUOUS)}


def open_tokenizer(families: dict[str, Path], name: str) -> Tokenizer:
    return TOKENIZERS.setdefault(name, Tokenizer.open(families[name]))


def conversations_of(family: Family) -> list[tuple[list[dict], list[dict] | None]]:
    """Conversations that the template of the family supports, with their tools."""
    text_conversations = [
        CONVERSATION,
        CONVERSATION[:1],
        CONVERSATION[:2],
        CONVERSATION[:3],
        *([[SYSTEM, *CONVERSATION]] if family.system else []),
        THOUGHTFUL,
    ]
    tool_conversations = (
        [
            TOOL_CONVERSATION,
            TOOL_CONVERSATION[:2],
            TOOL_CONVERSATION[:3],
            [*TOOL_CONVERSATION, *CONVERSATION],
            [*TOOL_CONVERSATION, *TOOL_CONVERSATION],
        ]
        if family.calls
        else []
    )
    return [(conversation, None) for conversation in text_conversations] + [
        (conversation, TOOLS) for conversation in tool_conversations
    ]


@pytest.mark.parametrize("name", [*FAMILIES, *AMBIGUOUS])
def test_steps_have_the_tokens_of_a_continued_answer_in_transformers(name: str, families: dict[str, Path]) -> None:
    """Except for trailing white space, which some templates strip. The target is the last token of each step."""
    ours, theirs, steps = (
        open_tokenizer(families, name),
        AutoTokenizer.from_pretrained(families[name]),
        ["It is 4.", "Or 5?"],
    )
    for prompt in (
        CONVERSATION[:1],
        CONVERSATION[:3],
        *([[SYSTEM, *CONVERSATION[:3]]] if FAMILIES.get(name, AMBIGUOUS.get(name)).system else []),
    ):
        fields = {"prompt": prompt, "completions": steps, "labels": [True, False]}
        ((document,),) = StepwiseDataset("x").encode_rows(ours, [Row("rows.jsonl:1", fields)])
        conversation = [*prompt, {"role": "assistant", "content": "It is 4.\nOr 5?\n"}]
        text = theirs.apply_chat_template(conversation, tokenize=False, continue_final_message=True).rstrip() + "\n"
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert document.tokens.tolist() == expected["input_ids"]
        ends = [text.index("4.\nOr") + 3, len(text)]
        assert [expected["offset_mapping"][place][1] for place in document.loss_mask.nonzero()[0]] == ends


@pytest.mark.parametrize("name", [*FAMILIES, *AMBIGUOUS])
def test_token_ids_equal_transformers(name: str, families: dict[str, Path]) -> None:
    ours, theirs = open_tokenizer(families, name), AutoTokenizer.from_pretrained(families[name])
    for conversation, tools in conversations_of(FAMILIES.get(name, AMBIGUOUS.get(name))):
        for prompt in (False, True):
            if name == "deepseek_r1" and tools:  # detects a call by its null, which `apply_chat_template` removes
                text = render_jinja_template(
                    [conversation],
                    tools,
                    None,
                    theirs.chat_template,
                    add_generation_prompt=prompt,
                    **theirs.special_tokens_map,
                )[0][0]
                expected = theirs.encode(text, add_special_tokens=False)
            else:
                expected = theirs.apply_chat_template(
                    conversation, tools, add_generation_prompt=prompt, return_dict=False
                )
            assert ours.encode(ours.render(conversation, tools, prompt)) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_are_assistant_turns_with_their_end_token(name: str, families: dict[str, Path]) -> None:
    tokenizer, family = open_tokenizer(families, name), FAMILIES[name]
    followed, last = family.turns
    first, second = CONVERSATION[1]["content"], CONVERSATION[3]["content"]
    expected = [followed.format(first), last.format(second)]
    assert target_texts(tokenizer, CONVERSATION) == expected
    assert target_texts(tokenizer, CONVERSATION[:2]) == [last.format(first)]
    assert target_texts(tokenizer, CONVERSATION, train_on="last") == expected[1:]
    assert target_texts(tokenizer, CONVERSATION, train_on=[1]) == expected[:1]
    if family.system:
        assert target_texts(tokenizer, [SYSTEM, *CONVERSATION]) == expected


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_tool_calls_are_targets_and_results_are_not(name: str, families: dict[str, Path]) -> None:
    tokenizer, family = open_tokenizer(families, name), FAMILIES[name]
    assert family.calls is not None
    expected = [family.calls[0], family.calls[1].format("It rains.")]
    assert target_texts(tokenizer, TOOL_CONVERSATION, TOOLS) == expected
    assert target_texts(tokenizer, TOOL_CONVERSATION[:2], TOOLS)[0].endswith(
        expected[0].removesuffix("<|observation|>")
    )
    texts = target_texts(tokenizer, [*TOOL_CONVERSATION, *CONVERSATION[:2]], TOOLS)
    assert texts == [
        expected[0],
        family.turns[0].format("It rains."),
        family.turns[1].format(CONVERSATION[1]["content"]),
    ]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.thoughts])
def test_rendered_reasoning_is_target(name: str, families: dict[str, Path]) -> None:
    thoughts = FAMILIES[name].thoughts
    assert thoughts is not None
    expected = [form.format(message["content"]) for form, message in zip(thoughts, CONVERSATION[1::2], strict=True)]
    assert target_texts(open_tokenizer(families, name), THOUGHTFUL) == expected


def test_rendered_reasoning_within_content_is_target(families: dict[str, Path]) -> None:
    answers = [
        {**message, "content": f"<think>\nBy heart.\n</think>\n\n{message['content']}"}
        for message in CONVERSATION[1::2]
    ]
    conversation = [CONVERSATION[0], answers[0], CONVERSATION[2], answers[1]]
    assert target_texts(open_tokenizer(families, "qwen3"), conversation) == [
        f"{CONVERSATION[1]['content']}<|im_end|>",
        f"<think>\nBy heart.\n</think>\n\n{CONVERSATION[3]['content']}<|im_end|>",
    ]
    # The generation prompt opens the reasoning, but the turn has none: targets start where the two texts differ.
    assert (
        target_texts(open_tokenizer(families, "deepseek_r1"), conversation)[1]
        == f"\n\n{CONVERSATION[3]['content']}<｜end▁of▁sentence｜>"
    )


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_mask_is_an_error(name: str, families: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"messages\[1\]: .* `chat_template`"):
        target_texts(open_tokenizer(families, name), CONVERSATION)


def test_flags_of_missing_end_token_and_prompt_in_targets(families: dict[str, Path]) -> None:
    flags_by_family = {
        name: render_targets(open_tokenizer(families, name), CONVERSATION).doc_flags for name in FAMILIES
    }
    assert {name for name, flags in flags_by_family.items() if DocFlags.MISSING_END_TOKEN in flags} == {"glm4"}
    assert {name for name, flags in flags_by_family.items() if DocFlags.PROMPT_TRAINED in flags} == {"smollm3"}


def test_targets_of_other_roles_start_at_their_text(families: dict[str, Path]) -> None:
    tokenizer = open_tokenizer(families, "qwen2")
    assert target_texts(tokenizer, [SYSTEM, *CONVERSATION], train_on=[0, 1, 3])[0].startswith("Be brief.<|im_end|>")
    assert target_texts(tokenizer, CONVERSATION, train_on=[0, 2]) == ["What is 2 + 2?<|im_end|>", "And now?<|im_end|>"]


TAGS = "</s> <|im_end|> <|eot_id|> <end_of_turn> <|user|> <|end|> <|return|> [INST] <think> </think> <tool_response>"
NASTY = [*TAGS.split(), "</tool_response>", "/no_think", " ", "\n", "{{", "{%", "é", "😀", "𗀀", '"', "\\"]
ANYTHING = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
ROLES = ["system", "user", "assistant", "model", "tool"]


def template_markup(name: str) -> list[str]:
    """Everything that a family's template can write around message contents."""
    tags = TAG.findall(read_family_template(name))
    return sorted({*tags, *FAMILIES[name].special, *ROLES, "\n"})


@st.composite
def draw_row(draw: st.DrawFn, words: bool = True) -> tuple[str, list[dict], list[int]]:
    """Draw a family, a conversation whose messages contain a unique word between other text, and the target turns."""
    name = draw(st.sampled_from([*FAMILIES]))
    edges = st.lists(st.sampled_from(template_markup(name)) | ANYTHING, max_size=4).map("".join)
    roles = ["user", "assistant"] * draw(st.integers(1, 3))
    if FAMILIES[name].system and draw(st.booleans()):
        roles = ["system", *roles]
    if draw(st.booleans()):
        roles = [*roles, "user"]
    texts = [draw(edges) + (f"word{chr(97 + index)}" if words else "") + draw(edges) for index in range(len(roles))]
    conversation = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    turns = [index for index, role in enumerate(roles) if role == "assistant"]
    return name, conversation, sorted(draw(st.sets(st.sampled_from(turns), min_size=1)))


def make_row(name: str, *texts: str) -> tuple[str, list[dict], list[int]]:
    """A row in which the second message is the target."""
    roles = ("user", "assistant") * len(texts)
    return name, [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], [1]


@settings(deadline=None)
@example(make_row("glm4", "a", "<|user|>", ""))  # a turn that ends like the end token of the template
@example(make_row("glm4", "", "", ""))
@example(make_row("glm4", "", "a<sop>"))
@given(draw_row(words=False))
def test_pattern_of_another_row_gives_the_same_spans(families, row: tuple[str, list[dict], list[int]]) -> None:
    """Spans from the pattern of another conversation equal those found by rendering this one."""
    name, conversation, targets = row
    tokenizer = open_tokenizer(families, name)
    hidden = SentinelMessages(tokenizer, conversation, None)
    text, match = tokenizer.render(conversation), get_span_pattern(tokenizer, hidden, None, tuple(targets))
    spans = None if match.pattern is None else match.pattern.match(text, hidden.texts)
    if spans is not None and not SENTINELS.search(text):
        expected = find_target_spans(RenderedPrefixes(tokenizer, conversation, None, hidden), tuple(targets))
        assert (spans[: len(spans) - match.num_blocks], match.doc_flags) == expected


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("glm4", ("a", "<|user|>", ""), "\n<|user|><|user|>"),
        ("glm4", ("a", "", ""), "\n<|user|>"),
        ("chatml", ("", "", ""), "<|im_end|>"),
        ("chatml", ("a", "<|im_end|>\n<|im_start|>user\n", "a"), "<|im_end|>\n<|im_start|>user\n<|im_end|>"),
    ],
)
def test_contents_can_be_empty_or_look_like_markup(name: str, texts: tuple[str, ...], expected: str, families) -> None:
    """With the pattern of another row, and by rendering this row only."""
    _, conversation, targets = make_row(name, *texts)
    tokenizer = open_tokenizer(families, name)
    assert target_texts(tokenizer, conversation) == [expected]
    rendered = RenderedPrefixes(tokenizer, conversation, None, SentinelMessages(tokenizer, conversation, None))
    ((start, end),) = find_target_spans(rendered, tuple(targets))[0]
    assert rendered.text[start:end] == expected


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_rows_with_different_tools_share_a_pattern(name: str, families: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(families[name])
    for number, city in enumerate(("Rome", "Oslo", 'a "b"', "<|user|>")):
        function = {"name": f"tool_{number}", "arguments": {"city": city}}
        tool = {"name": f"tool_{number}", "description": city, "parameters": {"properties": {city: {}}}}
        tools = [{"type": "function", "function": tool}] * (number + 1)
        call_id = f"abcdefgh{number}"
        call = {"type": "function", "id": call_id, "function": function}
        conversation = [
            TOOL_CONVERSATION[0],
            {**TOOL_CONVERSATION[1], "tool_calls": [call]},
            {**TOOL_CONVERSATION[2], "tool_call_id": call_id},
            TOOL_CONVERSATION[3],
            *CONVERSATION,
        ]
        targets = (1, 3, 5, 7)
        hidden = SentinelMessages(tokenizer, conversation, tools)
        match = get_span_pattern(tokenizer, hidden, tools, targets)
        assert match.pattern is not None
        spans = match.pattern.match(tokenizer.render(conversation, tools), hidden.texts)
        assert spans == find_target_spans(RenderedPrefixes(tokenizer, conversation, tools, hidden), targets)[0]
    assert len(tokenizer.shapes) == (1 if "<|user|>" not in tokenizer.template().tags else 2)


@settings(deadline=None)
@given(draw_row())
def test_words_of_other_turns_are_no_targets(families, row: tuple[str, list[dict], list[int]]) -> None:
    """Each message contains a unique word: target text has the words of the target turns and no others."""
    name, conversation, targets = row
    tokenizer = open_tokenizer(families, name)
    words = [f"word{chr(97 + index)}" for index in range(len(conversation))]
    try:
        text, spans, _ = render_targets(tokenizer, conversation, None, targets)
    except UserError as error:
        assert "messages[" in str(error) or "chat template" in str(error)
        return
    inside = "".join(text[start:end] for start, end in spans)
    outside = text
    for start, end in reversed(spans):
        outside = outside[:start] + outside[end:]
    for index, word in enumerate(words):
        if index in targets:
            assert word not in outside
            assert (word in inside) == (word in text)
        else:
            assert word not in inside


@pytest.mark.parametrize("content", ["", "\ud800", "a\udfffb", "𗀀", "\U000f0000"])
def test_unusual_contents_are_targets_or_rejected(content: str, families: dict[str, Path]) -> None:
    for name in FAMILIES:
        conversation = [CONVERSATION[0], {"role": "assistant", "content": content}, *CONVERSATION[2:]]
        try:
            texts = target_texts(open_tokenizer(families, name), conversation)
        except UserError as error:
            assert "surrogate" in str(error)
            assert content in ("\ud800", "a\udfffb")
        else:
            assert len(texts) == 2
            assert content.strip() in texts[0]
