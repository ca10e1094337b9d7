"""The templates of families of checkpoints: ids equal those of transformers, and what is learnt is written by hand."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.data.families import CALL, FAMILIES, FOLDER, UNSURE, Family, folder
from tunekit.data.chat_template.loss_mask import find, known, render_with_mask, token_range
from tunekit.data.chat_template.template import TAG
from tunekit.data.chat_template.turn_boundaries import HIDES, RenderedPrefixes, SentinelMessages
from tunekit.data.doc_flags import DocFlags
from tunekit.data.readers.row_reader import Row
from tunekit.data.reward_datasets import StepwiseDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4. 😀"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "naïve\n\n  café 你好"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {}}}]
CALLED = {"type": "function", "id": "abcdefghi", "function": json.loads(CALL)}
ASKED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "Rain.", "name": "weather", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It rains."},
]
THOUGHTFUL = [
    {**message, "reasoning_content": "By heart."} if index % 2 else message for index, message in enumerate(TALK)
]
OPEN: dict[str, Tokenizer] = {}


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: folder(tmp_path_factory.mktemp(name), name) for name in (*FAMILIES, *UNSURE)}


def opened(families: dict[str, Path], name: str) -> Tokenizer:
    return OPEN.setdefault(name, Tokenizer.open(families[name]))


def learnt(tokenizer: Tokenizer, talk: list[dict], tools=None, learn="assistant") -> list[str]:
    """The learnt runs of tokens, as text."""
    text, spans, _ = render_with_mask(tokenizer, talk, tools, learn)
    encoding = tokenizer.encode_rendered([text])[0]
    ranges = [token_range(encoding, text, span, tokenizer.marks) for span in spans]
    return [tokenizer.decode(encoding.ids[first:behind], special=True) for first, behind in ranges]


def talks(family: Family) -> list[tuple[list[dict], list[dict] | None]]:
    """Conversations that the family's template writes, with their tools."""
    plain = [TALK, TALK[:1], TALK[:2], TALK[:3], *([[SYSTEM, *TALK]] if family.system else []), THOUGHTFUL]
    asked = [ASKED, ASKED[:2], ASKED[:3], [*ASKED, *TALK], [*ASKED, *ASKED]] if family.calls else []
    return [(talk, None) for talk in plain] + [(talk, TOOLS) for talk in asked]


@pytest.mark.parametrize("name", [*FAMILIES, *UNSURE])
def test_judged_steps_stand_where_transformers_writes_an_answer_that_goes_on(
    name: str, families: dict[str, Path]
) -> None:
    """But for the white space at its end, which some templates trim. Each step is judged at its last token."""
    ours, theirs, steps = opened(families, name), AutoTokenizer.from_pretrained(families[name]), ["It is 4.", "Or 5?"]
    for prompt in (TALK[:1], TALK[:3], *([[SYSTEM, *TALK[:3]]] if FAMILIES.get(name, UNSURE.get(name)).system else [])):
        fields = {"prompt": prompt, "completions": steps, "labels": [True, False]}
        ((found,),) = StepwiseDataset("x").encode(ours, [Row("rows.jsonl:1", fields)])
        talk = [*prompt, {"role": "assistant", "content": "It is 4.\nOr 5?\n"}]
        text = theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True).rstrip() + "\n"
        want = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert found.tokens.tolist() == want["input_ids"]
        ends = [text.index("4.\nOr") + 3, len(text)]
        assert [want["offset_mapping"][place][1] for place in found.learnt.nonzero()[0]] == ends


@pytest.mark.parametrize("name", [*FAMILIES, *UNSURE])
def test_ids_equal_transformers(name: str, families: dict[str, Path]) -> None:
    ours, theirs = opened(families, name), AutoTokenizer.from_pretrained(families[name])
    for talk, tools in talks(FAMILIES.get(name, UNSURE.get(name))):
        for prompt in (False, True):
            if name == "deepseek_r1" and tools:  # knows a call by its null, which `apply_chat_template` takes away
                text = render_jinja_template(
                    [talk], tools, None, theirs.chat_template, add_generation_prompt=prompt, **theirs.special_tokens_map
                )[0][0]
                want = theirs.encode(text, add_special_tokens=False)
            else:
                want = theirs.apply_chat_template(talk, tools, add_generation_prompt=prompt, return_dict=False)
            assert ours.encode(ours.render(talk, tools, prompt)) == want


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_assistant_says_is_learnt_with_its_end(name: str, families: dict[str, Path]) -> None:
    tokenizer, family = opened(families, name), FAMILIES[name]
    followed, last = family.turns
    first, second = TALK[1]["content"], TALK[3]["content"]
    runs = [followed.format(first), last.format(second)]
    assert learnt(tokenizer, TALK) == runs
    assert learnt(tokenizer, TALK[:2]) == [last.format(first)]
    assert learnt(tokenizer, TALK, learn="last") == runs[1:]
    assert learnt(tokenizer, TALK, learn=[1]) == runs[:1]
    if family.system:
        assert learnt(tokenizer, [SYSTEM, *TALK]) == runs


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_calls_are_learnt_and_results_are_not(name: str, families: dict[str, Path]) -> None:
    tokenizer, family = opened(families, name), FAMILIES[name]
    assert family.calls is not None
    runs = [family.calls[0], family.calls[1].format("It rains.")]
    assert learnt(tokenizer, ASKED, TOOLS) == runs
    assert learnt(tokenizer, ASKED[:2], TOOLS)[0].endswith(runs[0].removesuffix("<|observation|>"))
    more = learnt(tokenizer, [*ASKED, *TALK[:2]], TOOLS)
    assert more == [runs[0], family.turns[0].format("It rains."), family.turns[1].format(TALK[1]["content"])]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.thoughts])
def test_reasoning_is_learnt_where_it_is_written(name: str, families: dict[str, Path]) -> None:
    thoughts = FAMILIES[name].thoughts
    assert thoughts is not None
    runs = [form.format(message["content"]) for form, message in zip(thoughts, TALK[1::2], strict=True)]
    assert learnt(opened(families, name), THOUGHTFUL) == runs


def test_reasoning_within_the_content_is_learnt_where_it_is_written(families: dict[str, Path]) -> None:
    said = [{**message, "content": f"<think>\nBy heart.\n</think>\n\n{message['content']}"} for message in TALK[1::2]]
    talk = [TALK[0], said[0], TALK[2], said[1]]
    assert learnt(opened(families, "qwen3"), talk) == [
        f"{TALK[1]['content']}<|im_end|>",
        f"<think>\nBy heart.\n</think>\n\n{TALK[3]['content']}<|im_end|>",
    ]
    # Here the prompt opens the reasoning, and what is kept of a turn has none: it is learnt from where they part.
    assert learnt(opened(families, "deepseek_r1"), talk)[1] == f"\n\n{TALK[3]['content']}<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("name", UNSURE)
def test_where_no_mask_is_sure_the_reason_and_the_way_out_are_told(name: str, families: dict[str, Path]) -> None:
    with pytest.raises(
        UserError, match=r"messages\[1\]: no mask is sure: .* otherwise when it prompts .* `chat_template`"
    ):
        learnt(opened(families, name), TALK)


def test_signs_of_turns_without_an_end_and_of_blocks_that_hold_the_prompt(families: dict[str, Path]) -> None:
    found = {name: render_with_mask(opened(families, name), TALK, None, "assistant").signs for name in FAMILIES}
    assert {name for name, signs in found.items() if DocFlags.UNENDED in signs} == {"glm4"}
    assert {name for name, signs in found.items() if DocFlags.PROMPT_LEARNT in signs} == {"smollm3"}


def test_other_roles_are_learnt_from_their_text_on(families: dict[str, Path]) -> None:
    tokenizer = opened(families, "qwen2")
    assert learnt(tokenizer, [SYSTEM, *TALK], learn=[0, 1, 3])[0].startswith("Be brief.<|im_end|>")
    assert learnt(tokenizer, TALK, learn=[0, 2]) == ["What is 2 + 2?<|im_end|>", "And now?<|im_end|>"]


TAGS = "</s> <|im_end|> <|eot_id|> <end_of_turn> <|user|> <|end|> <|return|> [INST] <think> </think> <tool_response>"
NASTY = [*TAGS.split(), "</tool_response>", "/no_think", " ", "\n", "{{", "{%", "é", "😀", "𗀀", '"', "\\"]
ANYTHING = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
ROLES = ["system", "user", "assistant", "model", "tool"]


def markup(name: str) -> list[str]:
    """What a family's template writes around texts."""
    written = TAG.findall((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    return sorted({*written, *FAMILIES[name].special, *ROLES, "\n"})


@st.composite
def rows(draw: st.DrawFn, words: bool = True) -> tuple[str, list[dict], list[int]]:
    """A family, a conversation in which each message says a word of its own between anything, and turns to learn."""
    name = draw(st.sampled_from([*FAMILIES]))
    edges = st.lists(st.sampled_from(markup(name)) | ANYTHING, max_size=4).map("".join)
    roles = ["user", "assistant"] * draw(st.integers(1, 3))
    if FAMILIES[name].system and draw(st.booleans()):
        roles = ["system", *roles]
    if draw(st.booleans()):
        roles = [*roles, "user"]
    texts = [draw(edges) + (f"word{chr(97 + index)}" if words else "") + draw(edges) for index in range(len(roles))]
    talk = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    turns = [index for index, role in enumerate(roles) if role == "assistant"]
    return name, talk, sorted(draw(st.sets(st.sampled_from(turns), min_size=1)))


def told(name: str, *texts: str) -> tuple[str, list[dict], list[int]]:
    """A row of which the second message is learnt."""
    roles = ("user", "assistant") * len(texts)
    return name, [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], [1]


@settings(deadline=None)
@example(told("glm4", "a", "<|user|>", ""))  # a turn that ends with what looks like the end that the template writes
@example(told("glm4", "", "", ""))
@example(told("glm4", "", "a<sop>"))
@given(rows(words=False))
def test_what_holds_for_a_shape_is_what_is_found_of_each(families, row: tuple[str, list[dict], list[int]]) -> None:
    """What was found of another conversation equals what is found by looking at this one."""
    name, talk, wanted = row
    tokenizer = opened(families, name)
    hidden = SentinelMessages(tokenizer, talk, None)
    text, found = tokenizer.render(talk), known(tokenizer, hidden, None, tuple(wanted))
    spans = None if found.layout is None else found.layout.fit(text, hidden.texts)
    if spans is not None and not HIDES.search(text):
        alone = find(RenderedPrefixes(tokenizer, talk, None, hidden), tuple(wanted))
        assert (spans[: len(spans) - found.blocks], found.signs) == alone


@pytest.mark.parametrize(
    ("name", "texts", "want"),
    [
        ("glm4", ("a", "<|user|>", ""), "\n<|user|><|user|>"),
        ("glm4", ("a", "", ""), "\n<|user|>"),
        ("chatml", ("", "", ""), "<|im_end|>"),
        ("chatml", ("a", "<|im_end|>\n<|im_start|>user\n", "a"), "<|im_end|>\n<|im_start|>user\n<|im_end|>"),
    ],
)
def test_texts_may_be_empty_or_like_the_templates_own(name: str, texts: tuple[str, ...], want: str, families) -> None:
    """By the layout of a shape, and by looking at the row alone, which other rows of its shape have no part in."""
    _, talk, wanted = told(name, *texts)
    tokenizer = opened(families, name)
    assert learnt(tokenizer, talk) == [want]
    writing = RenderedPrefixes(tokenizer, talk, None, SentinelMessages(tokenizer, talk, None))
    ((start, end),) = find(writing, tuple(wanted))[0]
    assert writing.text[start:end] == want


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_rows_with_tools_of_their_own_share_what_was_found_of_one(name: str, families: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(families[name])
    for number, city in enumerate(("Rome", "Oslo", 'a "b"', "<|user|>")):
        function = {"name": f"tool_{number}", "arguments": {"city": city}}
        tool = {"name": f"tool_{number}", "description": city, "parameters": {"properties": {city: {}}}}
        tools = [{"type": "function", "function": tool}] * (number + 1)
        ident = f"abcdefgh{number}"
        called = {"type": "function", "id": ident, "function": function}
        talk = [ASKED[0], {**ASKED[1], "tool_calls": [called]}, {**ASKED[2], "tool_call_id": ident}, ASKED[3], *TALK]
        wanted = (1, 3, 5, 7)
        hidden = SentinelMessages(tokenizer, talk, tools)
        found = known(tokenizer, hidden, tools, wanted)
        assert found.layout is not None
        spans = found.layout.fit(tokenizer.render(talk, tools), hidden.texts)
        assert spans == find(RenderedPrefixes(tokenizer, talk, tools, hidden), wanted)[0]
    assert len(tokenizer.shapes) == (1 if "<|user|>" not in tokenizer.template().tags else 2)


@settings(deadline=None)
@given(rows())
def test_nothing_but_the_learnt_turns_is_learnt(families, row: tuple[str, list[dict], list[int]]) -> None:
    """Every message says a word of its own, between anything: learnt text holds those of learnt turns and no other."""
    name, talk, wanted = row
    tokenizer = opened(families, name)
    words = [f"word{chr(97 + index)}" for index in range(len(talk))]
    try:
        text, spans, _ = render_with_mask(tokenizer, talk, None, wanted)
    except UserError as error:
        assert "no mask is sure" in str(error) or "chat template" in str(error)
        return
    inside = "".join(text[start:end] for start, end in spans)
    outside = text
    for start, end in reversed(spans):
        outside = outside[:start] + outside[end:]
    for index, word in enumerate(words):
        if index in wanted:
            assert word not in outside
            assert (word in inside) == (word in text)
        else:
            assert word not in inside


@pytest.mark.parametrize("content", ["", "\ud800", "a\udfffb", "𗀀", "\U000f0000"])
def test_strange_contents_are_learnt_or_told(content: str, families: dict[str, Path]) -> None:
    for name in FAMILIES:
        talk = [TALK[0], {"role": "assistant", "content": content}, *TALK[2:]]
        try:
            runs = learnt(opened(families, name), talk)
        except UserError as error:
            assert "lone surrogate" in str(error)
            assert content in ("\ud800", "a\udfffb")
        else:
            assert len(runs) == 2
            assert content.strip() in runs[0]
