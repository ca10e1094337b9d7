"""Rows with any content give documents, or a bad row with a one-line reason; loss masks are always correct."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.data.datasets import (
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
from tunekit.data.sft_datasets import AutoDataset, PretokenizedDataset, SegmentsDataset
from tunekit.data.tokenizer import Tokenizer

TOKENIZERS: dict[str, Tokenizer] = {}
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


def mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw from `strategy`, sometimes from JUNK."""
    return st.integers(0, 15).flatmap(lambda roll: strategy if roll else JUNK)


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
MESSAGES = mostly(st.lists(mostly(MESSAGE), max_size=5))
TURN = st.fixed_dictionaries(
    {"from": mostly(st.sampled_from(["human", "gpt", "function_call"])), "value": mostly(ANY_TEXT)}
)
SEGMENT = st.fixed_dictionaries({"text": mostly(ANY_TEXT), "train": mostly(st.booleans())})
SIDE = mostly(st.one_of(ANY_TEXT, MESSAGES))
TRAIN_ON = st.sampled_from(["assistant", "last", "all", "per_message", ("user", "tool"), ("assistant",)])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "messages": MESSAGES,
        "conversations": mostly(st.lists(mostly(TURN), max_size=4)),
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
        "segments": mostly(st.lists(mostly(SEGMENT), max_size=4)),
    },
)
TOKEN_FIELDS = st.fixed_dictionaries(
    {"input_ids": mostly(st.lists(mostly(st.integers(0, 30)), max_size=4))},
    optional={
        "labels": mostly(st.lists(mostly(st.sampled_from([-100, 1])), max_size=4)),
        "completion_mask": mostly(st.lists(st.integers(0, 1), max_size=4)),
        "attention_mask": mostly(st.lists(st.integers(0, 1), max_size=4)),
    },
)


def dataset_configs(train_on: Any) -> list[DatasetConfig]:
    preference_train_on = "assistant" if train_on == "all" else train_on
    conversations = [
        dataset_class("x", train_on=train_on)
        for dataset_class in (AutoDataset, ChatDataset, ShareGPTDataset, InstructDataset, CompletionDataset)
    ]
    return [
        *conversations,
        PreferenceDataset("x", train_on=preference_train_on),
        UnpairedPreferenceDataset("x", train_on=preference_train_on),
        TextDataset("x"),
        SegmentsDataset("x"),
        PretokenizedDataset("x"),
    ]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.one_of(FIELDS, TOKEN_FIELDS), TRAIN_ON, st.sampled_from(NAMES))
def test_every_row_gives_documents_or_a_bad_row(
    tokenizer_dirs: dict[str, Path], fields: dict, train_on: Any, name: str
) -> None:
    tokenizer = TOKENIZERS.setdefault(name, Tokenizer.open(tokenizer_dirs[name]))
    for dataset in dataset_configs(train_on):
        (result,) = dataset.encode_rows(tokenizer, [Row("x:1", fields)])
        if isinstance(result, BadRow):
            assert result.where == "x:1" and result.reason and "\n" not in result.reason
            continue
        assert isinstance(result, list) and len(result) == (2 if isinstance(dataset, PreferenceDataset) else 1)
        for document in result:
            assert len(document.tokens) == len(document.loss_mask) == document.full_length
            assert document.loss_mask[1:].any()


WORDS = st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=40)
# A line break at the start of an answer merges with that of the prompt into one token, which is no target.
TURNS = st.lists(st.tuples(WORDS, WORDS.map(str.lstrip)), min_size=1, max_size=4)
ENDS = {"chatml": "<|im_end|>", "headers": "<|eot_id|>", "turns": "<end_of_turn>", "generation": "<|im_end|>"}


@settings(deadline=None)
@given(TURNS, st.sampled_from([*ENDS]))
def test_mask_is_the_answers_and_their_end_tokens(tokenizer_dirs: dict[str, Path], turns: list, name: str) -> None:
    tokenizer = TOKENIZERS.setdefault(name, Tokenizer.open(tokenizer_dirs[name]))
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    (result,) = ChatDataset("x").encode_rows(tokenizer, [Row("x:1", {"messages": messages})])
    assert isinstance(result, list)
    (document,) = result
    trims = name in ("headers", "turns")
    expected = "".join((answer.strip() if trims else answer) + ENDS[name] for _, answer in turns)
    assert tokenizer.decode(document.tokens[document.loss_mask].tolist(), special=True) == expected


@pytest.mark.parametrize("dataset_class", [AutoDataset, ChatDataset])
def test_long_message_and_deep_nesting(dataset_class: type[DatasetConfig], tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = TOKENIZERS.setdefault("chatml", Tokenizer.open(tokenizer_dirs["chatml"]))
    long_messages = [{"role": "user", "content": "word " * 400_000}, {"role": "assistant", "content": "Yes."}]
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    rows = [
        {"messages": long_messages},
        {"messages": nested},
        {"messages": [{"role": "user", "content": nested}]},
        {"x": nested},
    ]
    first, *bad_rows = dataset_class("x", excess_length_strategy="split").encode_rows(
        tokenizer, [Row(f"x:{i}", row) for i, row in enumerate(rows)]
    )
    assert isinstance(first, list)
    assert [tokenizer.decode(window.tokens[window.loss_mask].tolist(), special=True) for window in first] == [
        "Yes.<|im_end|>"
    ]
    assert all(isinstance(bad_row, BadRow) and len(bad_row.reason) < 1000 for bad_row in bad_rows)


def test_values_that_json_accepts_are_bad_rows(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = TOKENIZERS.setdefault("chatml", Tokenizer.open(tokenizer_dirs["chatml"]))
    for text in ('{"messages": NaN}', '{"text": "\\ud800"}', '{"messages": [{"role": "user", "content": 1e999}]}'):
        (result,) = AutoDataset("x").encode_rows(tokenizer, [Row("x:1", json.loads(text))])
        assert isinstance(result, BadRow) and "\n" not in result.reason
