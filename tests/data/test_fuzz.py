"""Rows of any kind: each is documents, dropped, or a fault with a reason of one line; and no mask is ever wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.data.datasets import (
    AutoDataset,
    ChatDataset,
    CompletionDataset,
    DatasetConfig,
    InstructDataset,
    PreferenceDataset,
    ShareGPTDataset,
    TextDataset,
    UnpairedPreferenceDataset,
)
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.tokenizer import Tokenizer

OPEN: dict[str, Tokenizer] = {}
NAMES = ["chatml", "thinking", "headers", "turns", "closed", "generation"]
SPECIAL = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|eot_id|>",
    "<end_of_turn>",
    "</s>",
    "<think>",
    "</think>",
    "[INST]",
]
ANY_TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "\n", "\ud800", "a\udfffb", "\x00", "\ue000", "\U000f0000", "{{ 1 }}", *SPECIAL]),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT, st.sampled_from([b"x", {1}, ("a", 1), 10**4000])
)
KEYS = st.sampled_from(
    ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "type", "text"]
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)


def mostly(wanted: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What is wanted, and now and then anything."""
    return st.integers(0, 15).flatmap(lambda one: wanted if one else JUNK)


ROLE = st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "bot"])
CALL = st.fixed_dictionaries(
    {"function": mostly(st.fixed_dictionaries({"name": mostly(st.just("add")), "arguments": JUNK}))},
    optional={"id": mostly(st.sampled_from(["a", "b"])), "type": JUNK},
)
MESSAGE = st.fixed_dictionaries(
    {"role": mostly(ROLE), "content": mostly(ANY_TEXT)},
    optional={
        "tool_calls": mostly(st.lists(mostly(CALL), max_size=2)),
        "tool_call_id": mostly(st.sampled_from(["a", "b"])),
        "name": mostly(ANY_TEXT),
        "reasoning_content": mostly(ANY_TEXT),
        "train": mostly(st.booleans()),
        "weight": mostly(st.sampled_from([0, 1])),
        "other": JUNK,
    },
)
TALK = mostly(st.lists(mostly(MESSAGE), max_size=5))
SAID = st.fixed_dictionaries(
    {"from": mostly(st.sampled_from(["human", "gpt", "function_call"])), "value": mostly(ANY_TEXT)}
)
SIDE = mostly(st.one_of(ANY_TEXT, TALK))
LEARN = st.sampled_from(["assistant", "last", "all", "per_message", ("user", "tool"), ("assistant",)])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "messages": TALK,
        "conversations": mostly(st.lists(mostly(SAID), max_size=4)),
        "tools": st.one_of(JUNK, st.just('[{"name": "add"}]')),
        "system": mostly(ANY_TEXT),
        "instruction": mostly(ANY_TEXT),
        "input": mostly(ANY_TEXT),
        "output": mostly(ANY_TEXT),
        "history": mostly(st.lists(st.lists(ANY_TEXT, max_size=3), max_size=2)),
        "prompt": SIDE,
        "completion": SIDE,
        "chosen": SIDE,
        "rejected": SIDE,
        "label": mostly(st.booleans()),
        "text": mostly(ANY_TEXT),
    },
)


def kinds(learn: Any) -> list[DatasetConfig]:
    compared = "assistant" if learn == "all" else learn
    conversations = [
        cls("x", train_on=learn)
        for cls in (AutoDataset, ChatDataset, ShareGPTDataset, InstructDataset, CompletionDataset)
    ]
    return [
        *conversations,
        PreferenceDataset("x", train_on=compared),
        UnpairedPreferenceDataset("x", train_on=compared),
        TextDataset("x"),
    ]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(FIELDS, LEARN, st.sampled_from(NAMES))
def test_no_row_is_without_an_answer(folders: dict[str, Path], fields: dict, learn: Any, name: str) -> None:
    tokenizer = OPEN.setdefault(name, Tokenizer.open(folders[name]))
    for choice in kinds(learn):
        (found,) = choice.encode(tokenizer, [Row("x:1", fields)])
        if isinstance(found, BadRow):
            assert found.where == "x:1" and found.reason and "\n" not in found.reason
            continue
        assert isinstance(found, list) and len(found) == (2 if isinstance(choice, PreferenceDataset) else 1)
        for document in found:
            assert len(document.tokens) == len(document.learnt) == document.whole
            assert document.learnt[1:].any()


WORDS = st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=40)
# A line break that begins an answer is one token with the one before it, which the prompt ends with: it is not learnt.
TURNS = st.lists(st.tuples(WORDS, WORDS.map(str.lstrip)), min_size=1, max_size=4)
ENDS = {"chatml": "<|im_end|>", "headers": "<|eot_id|>", "turns": "<end_of_turn>", "generation": "<|im_end|>"}


@settings(deadline=None)
@given(TURNS, st.sampled_from([*ENDS]))
def test_a_mask_is_what_the_assistant_says_and_its_ends(folders: dict[str, Path], turns: list, name: str) -> None:
    tokenizer = OPEN.setdefault(name, Tokenizer.open(folders[name]))
    talk = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    (found,) = ChatDataset("x").encode(tokenizer, [Row("x:1", {"messages": talk})])
    assert isinstance(found, list)
    (document,) = found
    trims = name in ("headers", "turns")
    want = "".join((answer.strip() if trims else answer) + ENDS[name] for _, answer in turns)
    assert tokenizer.decode(document.tokens[document.learnt].tolist(), special=True) == want


@pytest.mark.parametrize("kind", [AutoDataset, ChatDataset])
def test_a_long_message_and_deep_nesting(kind: type[DatasetConfig], folders: dict[str, Path]) -> None:
    tokenizer = OPEN.setdefault("chatml", Tokenizer.open(folders["chatml"]))
    long = [{"role": "user", "content": "word " * 400_000}, {"role": "assistant", "content": "Yes."}]
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    rows = [{"messages": long}, {"messages": deep}, {"messages": [{"role": "user", "content": deep}]}, {"x": deep}]
    first, *rest = kind("x", excess_length_strategy="split").encode(
        tokenizer, [Row(f"x:{n}", row) for n, row in enumerate(rows)]
    )
    assert isinstance(first, list)
    assert [tokenizer.decode(part.tokens[part.learnt].tolist(), special=True) for part in first] == ["Yes.<|im_end|>"]
    assert all(isinstance(fault, BadRow) and len(fault.reason) < 1000 for fault in rest)


def test_rows_as_json_reads_them(folders: dict[str, Path]) -> None:
    tokenizer = OPEN.setdefault("chatml", Tokenizer.open(folders["chatml"]))
    for text in ('{"messages": NaN}', '{"text": "\\ud800"}', '{"messages": [{"role": "user", "content": 1e999}]}'):
        (found,) = AutoDataset("x").encode(tokenizer, [Row("x:1", json.loads(text))])
        assert isinstance(found, BadRow) and "\n" not in found.reason
