"""Loss masks equal expected texts: the assistant's messages and their end tokens, and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers.loss_masks import render_targets, target_texts
from tunekit.data.chat_template.loss_mask import token_range
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4. 😀"},
    {"role": "user", "content": "It is 4. 😀"},
    {"role": "assistant", "content": "naïve\n\n  café 你好"},
]
FIRST, LAST = CONVERSATION[1]["content"], CONVERSATION[3]["content"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [f"{FIRST}<|im_end|>", f"{LAST}<|im_end|>"]),
        ("thinking", [f"{FIRST}<|im_end|>", f"<think>\n\n</think>\n\n{LAST}<|im_end|>"]),
        ("headers", [f"{FIRST}<|eot_id|>", f"{LAST}<|eot_id|>"]),
        ("turns", [f"{FIRST}<end_of_turn>", f"{LAST}<end_of_turn>"]),
        ("brackets", [f" {FIRST}</s>", f" {LAST}</s>"]),
        ("closed", [f"{FIRST}<|end|>", f"{LAST}<|end|><|endoftext|>"]),
        ("plain", [f" {FIRST}\n\n", f" {LAST}\n\n"]),  # the space of the prompt merges with the first word
        ("generation", [f"{FIRST}<|im_end|>", f"{LAST}<|im_end|>"]),
    ],
)
def test_targets_are_assistant_turns_with_their_end_tokens(
    name: str, expected: list[str], tokenizer_dirs: dict[str, Path]
) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs[name])
    assert target_texts(tokenizer, CONVERSATION) == expected
    assert target_texts(tokenizer, CONVERSATION, train_on="last") == expected[-1:]
    assert target_texts(tokenizer, CONVERSATION[:2]) == [expected[-1].replace(LAST, FIRST)]
    text = tokenizer.render(CONVERSATION)
    assert target_texts(tokenizer, CONVERSATION, train_on="all") == [
        tokenizer.decode(tokenizer.encode(text), special=True)
    ]


def test_rendered_reasoning_is_target(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs["thinking"])
    answer = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"}
    with_reasoning = "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"
    assert target_texts(tokenizer, [CONVERSATION[0], answer]) == [with_reasoning]
    assert target_texts(tokenizer, [CONVERSATION[0], answer, CONVERSATION[2], answer]) == [
        "4<|im_end|>",
        with_reasoning,
    ]
    assert target_texts(tokenizer, [CONVERSATION[0], answer, CONVERSATION[2]]) == ["4<|im_end|>"]


def test_assistant_turns_can_follow_each_other(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"])
    conversation = [CONVERSATION[1], CONVERSATION[1], CONVERSATION[0]]
    assert target_texts(tokenizer, conversation) == [f"{FIRST}<|im_end|>"] * 2
    assert target_texts(Tokenizer.open(tokenizer_dirs["closed"]), conversation) == [f"{FIRST}<|end|>"] * 2


def test_end_token_of_the_last_turn_only_makes_masks_ambiguous(tmp_path, tokenizer_dirs) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
    (tmp_path / "form.jinja").write_text(template)
    tokenizer = Tokenizer.open(tokenizer_dirs["plain"]).with_template(str(tmp_path / "form.jinja"))
    with pytest.raises(UserError, match=r"messages\[1\]: "):
        target_texts(tokenizer, CONVERSATION)
    assert target_texts(tokenizer, CONVERSATION, train_on="last") == [f" {LAST}\n<|endoftext|>"]


@pytest.mark.parametrize(("prompt_suffix", "is_clear"), [(" <think>", True), ("<think>", False), ("\n<think>", False)])
def test_generation_prompt_that_turns_lack_makes_masks_ambiguous(
    prompt_suffix: str, is_clear: bool, tmp_path, tokenizer_dirs
) -> None:
    """A turn starts where it differs from the prompt. If the template itself differs there, the mask is ambiguous."""
    (tmp_path / "form.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant" + prompt_suffix + "{% endif %}"
    )
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"]).with_template(str(tmp_path / "form.jinja"))
    if is_clear:
        assert target_texts(tokenizer, CONVERSATION) == [f" {FIRST}<|im_end|>", f" {LAST}<|im_end|>"]
        return
    with pytest.raises(UserError, match=r"messages\[1\]: "):
        target_texts(tokenizer, CONVERSATION)


@pytest.mark.parametrize(("block", "blocks"), [("user", 2), ("tool", 0)])
def test_blocks_must_match_turns_to_select_the_last(block, blocks, tmp_path, tokenizer_dirs) -> None:
    (tmp_path / "form.jinja").write_text(
        "{% for m in messages %}{% if m.role in ['assistant', '" + block + "'] %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% if m.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"]).with_template(str(tmp_path / "form.jinja"))
    with pytest.raises(UserError, match=f"{4 + blocks} generation blocks.* 2 assistant turns"):
        target_texts(tokenizer, CONVERSATION, train_on="last")


@pytest.mark.parametrize("condition", ["'good' in m.content", "m.content | length > 5"])
def test_blocks_can_depend_on_message_contents(condition: str, tmp_path, tokenizer_dirs) -> None:
    """The pattern of a conversation is not reused for one whose generation blocks differ."""
    (tmp_path / "form.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and " + condition + " %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"]).with_template(str(tmp_path / "form.jinja"))
    for content, has_block in [("bad", False), ("a good one", True), ("no", False), ("good ones", True)]:
        conversation = [{"role": "user", "content": "good?"}, {"role": "assistant", "content": content}]
        assert target_texts(tokenizer, conversation) == ([f"{content}<|im_end|>"] if has_block else [])


TOKENIZERS: dict[str, Tokenizer] = {}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


SHAPE_NAMES = ["chatml", "headers", "turns", "brackets", "closed", "plain"]


@given(st.lists(TEXTS, min_size=4, max_size=4), st.sampled_from(SHAPE_NAMES))
def test_targets_have_exact_character_bounds(tokenizer_dirs: dict[str, Path], texts: list[str], name: str) -> None:
    tokenizer = TOKENIZERS.setdefault(name, Tokenizer.open(tokenizer_dirs[name]))
    conversation = [{**message, "content": text} for message, text in zip(CONVERSATION, texts, strict=True)]
    text, spans, _ = render_targets(tokenizer, conversation)
    encoding = tokenizer.encode_rendered([text])[0]
    for (start, end), content in zip(spans, texts[1::2], strict=True):
        assert content.strip() in text[start:end]
        first_token, last_token = token_range(encoding, text, (start, end), tokenizer.special_ids)
        for i, (low, high) in enumerate(encoding.offsets):
            is_after_start = start <= low or (text[low:start].isspace() and text[start:high].strip() != "")
            is_before_end = high <= end or encoding.ids[i] in tokenizer.special_ids
            assert (first_token <= i < last_token) == (is_after_start and is_before_end and low < end)


def test_generation_mask_equals_transformers_on_ascii_text(tokenizer_dirs: dict[str, Path]) -> None:
    ours, theirs = (
        Tokenizer.open(tokenizer_dirs["generation"]),
        AutoTokenizer.from_pretrained(tokenizer_dirs["generation"]),
    )
    conversation = [
        {**message, "content": message["content"].encode("ascii", "replace").decode()} for message in CONVERSATION
    ]
    expected = theirs.apply_chat_template(conversation, return_assistant_tokens_mask=True, return_dict=True)
    text, spans, _ = render_targets(ours, conversation)
    encoding = ours.encode_rendered([text])[0]
    mask = [0] * len(encoding)
    for span in spans:
        start, end = token_range(encoding, text, span, ours.special_ids)
        mask[start:end] = [1] * (end - start)
        assert encoding.ids[end - 1] == ours.eos  # ours includes the end token, which is outside the block
        mask[end - 1] = 0
    assert mask == expected["assistant_masks"]
