"""Masks against expectations written by hand: what the assistant says and the token that ends it, nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tunekit.data.chat_template.loss_mask import render_with_mask, token_range
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4. 😀"},
    {"role": "user", "content": "It is 4. 😀"},
    {"role": "assistant", "content": "naïve\n\n  café 你好"},
]
FIRST, LAST = TALK[1]["content"], TALK[3]["content"]


def learnt(tokenizer: Tokenizer, talk: list[dict], learn="assistant") -> list[str]:
    """The learnt runs of tokens, as text."""
    text, spans, _ = render_with_mask(tokenizer, talk, None, learn)
    encoding = tokenizer.encode_rendered([text])[0]
    ranges = [token_range(encoding, text, span, tokenizer.marks) for span in spans]
    return [tokenizer.decode(encoding.ids[first:behind], special=True) for first, behind in ranges]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("chatml", [f"{FIRST}<|im_end|>", f"{LAST}<|im_end|>"]),
        ("thinking", [f"{FIRST}<|im_end|>", f"<think>\n\n</think>\n\n{LAST}<|im_end|>"]),
        ("headers", [f"{FIRST}<|eot_id|>", f"{LAST}<|eot_id|>"]),
        ("turns", [f"{FIRST}<end_of_turn>", f"{LAST}<end_of_turn>"]),
        ("brackets", [f" {FIRST}</s>", f" {LAST}</s>"]),
        ("closed", [f"{FIRST}<|end|>", f"{LAST}<|end|><|endoftext|>"]),
        ("plain", [f" {FIRST}\n\n", f" {LAST}\n\n"]),  # the prompt ends in a space, which the first word takes in
        ("generation", [f"{FIRST}<|im_end|>", f"{LAST}<|im_end|>"]),
    ],
)
def test_the_assistants_turns_and_their_ends_are_learnt(name: str, runs: list[str], folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders[name])
    assert learnt(tokenizer, TALK) == runs
    assert learnt(tokenizer, TALK, "last") == runs[-1:]
    assert learnt(tokenizer, TALK[:2]) == [runs[-1].replace(LAST, FIRST)]
    whole = tokenizer.render(TALK)
    assert learnt(tokenizer, TALK, "all") == [tokenizer.decode(tokenizer.encode(whole), special=True)]


def test_reasoning_is_learnt_where_the_template_keeps_it(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["thinking"])
    first = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"}
    kept = "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"
    assert learnt(tokenizer, [TALK[0], first]) == [kept]
    assert learnt(tokenizer, [TALK[0], first, TALK[2], first]) == ["4<|im_end|>", kept]
    assert learnt(tokenizer, [TALK[0], first, TALK[2]]) == ["4<|im_end|>"]


def test_turns_may_follow_each_other_and_end_with_the_user(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["chatml"])
    talk = [TALK[1], TALK[1], TALK[0]]
    assert learnt(tokenizer, talk) == [f"{FIRST}<|im_end|>"] * 2
    assert learnt(Tokenizer.open(folders["closed"]), talk) == [f"{FIRST}<|end|>"] * 2


def test_an_end_that_stands_only_at_the_very_end_does_not_swallow_other_turns(tmp_path, folders) -> None:
    form = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    form += "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
    (tmp_path / "form.jinja").write_text(form)
    tokenizer = Tokenizer.open(folders["plain"], str(tmp_path / "form.jinja"))
    with pytest.raises(
        UserError, match=r"messages\[1\]: no mask is sure: .* the end of this turn otherwise when more follows; leave"
    ):
        learnt(tokenizer, TALK)
    assert learnt(tokenizer, TALK, "last") == [f" {LAST}\n<|endoftext|>"]


@pytest.mark.parametrize(("form", "sure"), [(" <think>", True), ("<think>", False), ("\n<think>", False)])
def test_a_prompt_may_go_on_where_a_turn_says_something_else(form: str, sure: bool, tmp_path, folders) -> None:
    """A turn begins where it leaves the prompt; if the template itself leaves it, no mask is sure."""
    (tmp_path / "form.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant" + form + "{% endif %}"
    )
    tokenizer = Tokenizer.open(folders["chatml"], str(tmp_path / "form.jinja"))
    if sure:
        assert learnt(tokenizer, TALK) == [f" {FIRST}<|im_end|>", f" {LAST}<|im_end|>"]
        return
    with pytest.raises(UserError, match=r"messages\[1\]: no mask is sure: .* prompts for this turn"):
        learnt(tokenizer, TALK)


@pytest.mark.parametrize(("block", "blocks"), [("user", 2), ("nobody", 0)])
def test_blocks_that_are_not_one_a_turn_do_not_say_which_is_last(block, blocks, tmp_path, folders) -> None:
    (tmp_path / "form.jinja").write_text(
        "{% for m in messages %}{% if m.role in ['assistant', '" + block + "'] %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% if m.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer.open(folders["chatml"], str(tmp_path / "form.jinja"))
    with pytest.raises(UserError, match=f"marks {4 + blocks} generation blocks in 2 assistant turns"):
        learnt(tokenizer, TALK, "last")


@pytest.mark.parametrize("test", ["'good' in m.content", "m.content | length > 5"])
def test_blocks_may_depend_on_what_a_message_says(test: str, tmp_path, folders) -> None:
    """What was found of a conversation does not hold for others of its shape where only the marks differ."""
    (tmp_path / "form.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and " + test + " %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer.open(folders["chatml"], str(tmp_path / "form.jinja"))
    for said, marked in [("bad", False), ("a good one", True), ("no", False), ("good ones", True)]:
        talk = [{"role": "user", "content": "good?"}, {"role": "assistant", "content": said}]
        assert learnt(tokenizer, talk) == ([f"{said}<|im_end|>"] if marked else [])


OPEN: dict[str, Tokenizer] = {}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


SHAPES = ["chatml", "headers", "turns", "brackets", "closed", "plain"]


@given(st.lists(TEXTS, min_size=4, max_size=4), st.sampled_from(SHAPES))
def test_any_text_is_learnt_to_the_character(folders: dict[str, Path], texts: list[str], name: str) -> None:
    tokenizer = OPEN.setdefault(name, Tokenizer.open(folders[name]))
    talk = [{**message, "content": text} for message, text in zip(TALK, texts, strict=True)]
    text, spans, _ = render_with_mask(tokenizer, talk, None, "assistant")
    encoding = tokenizer.encode_rendered([text])[0]
    for (start, end), said in zip(spans, texts[1::2], strict=True):
        assert said.strip() in text[start:end]
        first, behind = token_range(encoding, text, (start, end), tokenizer.marks)
        for at, (low, high) in enumerate(encoding.offsets):
            begins = start <= low or (text[low:start].isspace() and text[start:high].strip() != "")
            ends = high <= end or encoding.ids[at] in tokenizer.marks
            assert (first <= at < behind) == (begins and ends and low < end)


def test_generation_masks_equal_transformers_on_text_of_one_byte_characters(folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.open(folders["generation"]), AutoTokenizer.from_pretrained(folders["generation"])
    talk = [{**message, "content": message["content"].encode("ascii", "replace").decode()} for message in TALK]
    want = theirs.apply_chat_template(talk, return_assistant_tokens_mask=True, return_dict=True)
    text, spans, _ = render_with_mask(ours, talk, None, "assistant")
    encoding = ours.encode_rendered([text])[0]
    mask = [0] * len(encoding)
    for span in spans:
        first, behind = token_range(encoding, text, span, ours.marks)
        mask[first:behind] = [1] * (behind - first)
        assert encoding.ids[behind - 1] == ours.eos  # ours has the end of the turn, which stands outside the block
        mask[behind - 1] = 0
    assert mask == want["assistant_masks"]
