"""Dataset classes convert a row of each format to documents, or reject it with a reason."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.data.chat_template.turn_boundaries import SENTINEL_NUMBER
from tunekit.data.column_usage import ColumnUsage
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
from tunekit.data.document import DocFlags
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Hello there 😀"},
]
QUESTION, ANSWER = CONVERSATION[:2]
BOTH = "It is 4.<|im_end|>Hello there 😀<|im_end|>"
# Writes calls as JSON, and tool schemas before all messages.
TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content %}{{ m.content }}{% endif %}
    {%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.fixture
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


@pytest.fixture
def tools(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> Tokenizer:
    (tmp_path / "tools.jinja").write_text(TOOLS)
    return Tokenizer.open(tokenizer_dirs["chatml"]).with_template(str(tmp_path / "tools.jinja"))


def encode_documents(dataset: DatasetConfig, tokenizer: Tokenizer, *fields: dict) -> Iterator:
    """Yield the documents of all rows, encoded in one call."""
    tokenizer = dataset.prepare_tokenizer(tokenizer)
    for result in dataset.encode_rows(tokenizer, [Row(f"rows.jsonl:{i}", row) for i, row in enumerate(fields, 1)]):
        assert isinstance(result, list), result
        for document in result:
            assert document.tokens.dtype == "int32" and document.loss_mask.dtype == bool
            yield document


def target_texts(dataset: DatasetConfig, tokenizer: Tokenizer, *fields: dict) -> list[str]:
    """Target text of each document. The first token is never a target."""
    return [
        tokenizer.decode(document.tokens[1:][document.loss_mask[1:]].tolist(), special=True)
        for document in encode_documents(dataset, tokenizer, *fields)
    ]


def full_texts(dataset: DatasetConfig, tokenizer: Tokenizer, *fields: dict) -> list[str]:
    return [
        tokenizer.decode(document.tokens.tolist(), special=True)
        for document in encode_documents(dataset, tokenizer, *fields)
    ]


def reject_reason(dataset: DatasetConfig, tokenizer: Tokenizer, fields: dict) -> str:
    (result,) = dataset.encode_rows(dataset.prepare_tokenizer(tokenizer), [Row("rows.jsonl:7", fields)])
    assert isinstance(result, BadRow) and result.where == "rows.jsonl:7", result
    return result.reason


def test_chat_targets_are_the_assistant_messages(tokenizer: Tokenizer) -> None:
    rows = {"messages": CONVERSATION, "tools": None}, {"messages": CONVERSATION[:2], "tools": []}
    assert target_texts(ChatDataset("x"), tokenizer, *rows) == [BOTH, "It is 4.<|im_end|>"]
    assert full_texts(ChatDataset("x"), tokenizer, *rows) == [
        tokenizer.render(CONVERSATION),
        tokenizer.render(CONVERSATION[:2]),
    ]
    assert target_texts(ChatDataset("x", train_on="last"), tokenizer, rows[0]) == ["Hello there 😀<|im_end|>"]
    everything = tokenizer.render(CONVERSATION).removeprefix("<|im_start|>")
    assert target_texts(ChatDataset("x", train_on="all"), tokenizer, rows[0]) == [everything]
    assert target_texts(ChatDataset("x", train_on="all"), tokenizer, {"messages": CONVERSATION[:1]}) == [
        "user\nWhat is 2 + 2?<|im_end|>\n"
    ]


def test_json_cells_are_parsed_as_messages(tokenizer: Tokenizer) -> None:
    conversation = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = {
        ChatDataset("x"): {"messages": CONVERSATION},
        ShareGPTDataset("x"): {"conversations": conversation},
        CompletionDataset("x"): {"prompt": [QUESTION], "completion": [ANSWER]},
        PreferenceDataset("x"): {
            "prompt": [QUESTION],
            "chosen": [ANSWER],
            "rejected": [{**ANSWER, "content": "It is 5."}],
        },
    }
    for dataset, row in rows.items():
        cells = {name: f" {json.dumps(value)}" for name, value in row.items()}
        assert target_texts(dataset, tokenizer, cells) == target_texts(dataset, tokenizer, row)
    for row in ({"messages": CONVERSATION}, {"messages": conversation}):
        assert target_texts(AutoDataset("x"), tokenizer, {"messages": json.dumps(row["messages"])}) == target_texts(
            AutoDataset("x"), tokenizer, row
        )
    for text in ('[{"a": 1}]', '[{"role": "user"', "[1]", "[]"):  # plain texts, not messages
        assert target_texts(CompletionDataset("x"), tokenizer, {"prompt": "say: ", "completion": text}) == [
            f"{text}<|im_end|>"
        ]


def test_train_on_selects_roles(tokenizer: Tokenizer) -> None:
    conversation = [{"role": "system", "content": "Be kind."}, *CONVERSATION]
    user_targets = "What is 2 + 2?<|im_end|>Thanks.<|im_end|>"
    assert target_texts(ChatDataset("x", train_on=("user",)), tokenizer, {"messages": conversation}) == [user_targets]
    system_and_assistant_targets = "Be kind.<|im_end|>" + BOTH
    assert target_texts(ChatDataset("x", train_on=("system", "assistant")), tokenizer, {"messages": conversation}) == [
        system_and_assistant_targets
    ]
    assert "tool" in reject_reason(ChatDataset("x", train_on=("tool",)), tokenizer, {"messages": conversation})


def with_flags(*flags: object, key: str = "train") -> dict:
    """Add the flag to each message that has one."""
    return {"messages": [m if f is None else {**m, key: f} for m, f in zip(CONVERSATION, flags, strict=True)]}


def test_per_message_flags_select_targets(tokenizer: Tokenizer) -> None:
    rows = ChatDataset("x", train_on="per_message")
    cases = {
        (None, True, None, None): "It is 4.<|im_end|>",
        (None, False, None, None): "Hello there 😀<|im_end|>",
        (False, False, False, True): "Hello there 😀<|im_end|>",
        (True, True, None, None): "What is 2 + 2?<|im_end|>It is 4.<|im_end|>",
        (None, None, None, None): BOTH,
    }
    assert [target_texts(rows, tokenizer, with_flags(*flags)) for flags in cases] == [[text] for text in cases.values()]
    assert target_texts(rows, tokenizer, with_flags(None, 0, None, 1, key="weight")) == ["Hello there 😀<|im_end|>"]
    assert "message" in reject_reason(rows, tokenizer, with_flags(None, False, None, False))


@pytest.mark.parametrize("answers", [{}, {"train": True}], ids=["unmarked", "marked"])
def test_flags_in_a_prompt_are_ignored(answers: dict, tokenizer: Tokenizer) -> None:
    """Flagged answers in a prompt are no targets."""
    prompt = [QUESTION, {**ANSWER, "train": True}, QUESTION]
    chosen, rejected = ({"role": "assistant", "content": text, **answers} for text in ("Yes.", "No."))
    ends = ["Yes.<|im_end|>", "No.<|im_end|>"]
    for row in (
        {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]},
        {"chosen": [*prompt, chosen], "rejected": [*prompt, rejected]},
    ):
        assert target_texts(PreferenceDataset("x", train_on="per_message"), tokenizer, row) == ends
        assert target_texts(PreferenceDataset("x"), tokenizer, row) == ends
    single = {"prompt": prompt, "completion": [chosen]}
    assert target_texts(CompletionDataset("x", train_on="per_message"), tokenizer, single) == ends[:1]
    assert (
        target_texts(UnpairedPreferenceDataset("x", train_on="per_message"), tokenizer, {**single, "label": True})
        == ends[:1]
    )


def test_flags_that_contradict_train_on_are_rejected(tokenizer: Tokenizer) -> None:
    for train_on, flags, index in (
        ("assistant", (None, False, None, True), 1),
        ("assistant", (True, True, None, None), 0),
        (("user",), (False, None, None, None), 0),
        ("all", (False, None, None, None), 0),
    ):
        reason = reject_reason(ChatDataset("x", train_on=train_on), tokenizer, with_flags(*flags))
        value = train_on if isinstance(train_on, str) else "[user]"
        assert f"messages[{index}]: the train flag is " in reason and f"train_on: {value}" in reason
    weighted = [CONVERSATION[0], {**CONVERSATION[1], "weight": 0}, *CONVERSATION[2:]]
    assert "messages[1]: the weight is 0" in reject_reason(ChatDataset("x"), tokenizer, {"messages": weighted})
    assert target_texts(ChatDataset("x"), tokenizer, with_flags(False, True, False, True)) == [BOTH], "same as train_on"
    assert target_texts(ChatDataset("x", train_on="last"), tokenizer, with_flags(None, True, None, True)) == [
        "Hello there 😀<|im_end|>"
    ]


def test_tool_calls_are_targets_and_their_results_are_not(tools: Tokenizer) -> None:
    call_message = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": CALL}]}
    conversation = [QUESTION, call_message, {"role": "tool", "tool_call_id": "a", "content": "4"}, ANSWER]
    (document,) = encode_documents(AutoDataset("x"), tools, {"messages": conversation, "tools": [SCHEMA]})
    text = tools.decode(document.tokens.tolist(), special=True)
    assert text == (
        f"<|im_start|>system\n{json.dumps(SCHEMA)}<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        f"<|im_start|>assistant\n{json.dumps(CALL)}<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    )
    targets = f"{json.dumps(CALL)}<|im_end|>It is 4.<|im_end|>"
    assert tools.decode(document.tokens[document.loss_mask].tolist(), special=True) == targets
    assert document.doc_flags == DocFlags(0)


NUMBERS = (
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9999).map(SENTINEL_NUMBER.__add__)
)


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.text("ab", min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_numbers_and_ids_of_calls_share_one_pattern(tools: Tokenizer, numbers: list, name: str) -> None:
    tools.shapes.clear()
    for row in (numbers, [0.5 for _ in numbers]):
        call = {"name": "add", "arguments": {"of": row, "first": row[0], "yes": True}}
        call_message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"{name}{row[0]}", "function": call}],
        }
        result = {"role": "tool", "tool_call_id": f"{name}{row[0]}", "content": json.dumps(row)}
        conversation = [QUESTION, call_message, result, {"role": "assistant", "content": str(row[0])}]
        assert target_texts(ChatDataset("x"), tools, {"messages": conversation}) == [
            f"{json.dumps(call)}<|im_end|>{row[0]}<|im_end|>"
        ]
    assert len(tools.shapes) == 1, "numbers and ids do not change the pattern"


def test_sharegpt_equals_openai_messages(tools: Tokenizer) -> None:
    rows = {
        "conversations": [
            {"from": "human", "value": QUESTION["content"]},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": ANSWER["content"]},
        ],
        "system": "Be kind.",
        "tools": json.dumps([SCHEMA["function"]]),
    }
    messages = [
        {"role": "system", "content": "Be kind."},
        QUESTION,
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "4"},
        ANSWER,
    ]
    expected = {"messages": messages, "tools": [SCHEMA]}
    assert (
        full_texts(ShareGPTDataset("x"), tools, rows)
        == full_texts(AutoDataset("x"), tools, rows)
        == full_texts(ChatDataset("x"), tools, expected)
    )
    assert target_texts(ShareGPTDataset("x"), tools, rows) == target_texts(ChatDataset("x"), tools, expected)
    assert full_texts(AutoDataset("x"), tools, {"conversations": CONVERSATION}) == [tools.render(CONVERSATION)], (
        "roles in another column"
    )
    flagged_conversation = [*rows["conversations"][:3], {**rows["conversations"][3], "weight": 0}]
    assert target_texts(
        ShareGPTDataset("x", train_on="per_message"), tools, {"conversations": flagged_conversation}
    ) == [f"{json.dumps(CALL)}<|im_end|>"]


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"conversations": [{"from": "humn", "value": "a"}]}, "conversations[0].from", "'human'"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations[0].from", "'bot'"),
        ({"conversations": [{"from": "human", "value": 3}]}, "conversations[0].value", "number"),
        ({"conversations": [3]}, "conversations[0]", "number"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{"}]},
            "conversations[1].value",
            "JSON",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "[{}]"}]},
            "conversations[1].value.name",
            "null",
        ),
        ({"conversations": [{"from": "system", "value": "a"}], "system": "b"}, "conversations[0]", "system"),
        ({"conversations": [{"from": "human", "value": "a"}], "system": 3}, "system", "number"),
        ({"conversations": []}, "conversations", "empty"),
    ],
)
def test_invalid_sharegpt_names_path_and_value(fields: dict, path: str, value: str, tokenizer: Tokenizer) -> None:
    reason = reject_reason(ShareGPTDataset("x"), tokenizer, fields)
    assert reason.startswith(f"{path}:") and value in reason


def test_instruct_row_becomes_question_and_answer(tokenizer: Tokenizer) -> None:
    rows = [
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"instruction": "Add.", "input": "", "output": "4"},
        {"instruction": "Add.", "output": "4"},
        {"instruction": "Add.", "input": None, "output": "4", "system": "Be long.", "history": [["a", "b"]]},
    ]
    texts_per_row = [
        ["Be brief.", "Add.\n\n2, 2", "4"],
        ["Be brief.", "Add.", "4"],
        ["Be brief.", "Add.", "4"],
        ["Be long.", "a", "b", "Add.", "4"],
    ]
    roles = ("system", "user", "assistant", "user", "assistant")
    conversations = [[{"role": r, "content": c} for r, c in zip(roles, texts, strict=False)] for texts in texts_per_row]
    dataset = InstructDataset("x", system_prompt="Be brief.")
    assert full_texts(dataset, tokenizer, *rows) == [tokenizer.render(conversation) for conversation in conversations]
    assert target_texts(dataset, tokenizer, *rows) == [*["4<|im_end|>"] * 3, "b<|im_end|>4<|im_end|>"]
    assert target_texts(replace(dataset, train_on="last"), tokenizer, rows[3]) == ["4<|im_end|>"]
    swapped = InstructDataset("x", columns={"prompt": "input", "input": None, "completion": "instruction"})
    assert target_texts(swapped, tokenizer, rows[0]) == ["Add.<|im_end|>"]
    reason = reject_reason(InstructDataset("x", columns={"input": "contxt"}), tokenizer, rows[0])
    assert "'contxt'" in reason and "input" in reason
    for history, path in (({}, "history:"), ([["a"]], "history[0]:")):
        assert reject_reason(dataset, tokenizer, {**rows[0], "history": history}).startswith(path)


def test_completion_is_target_and_its_prompt_is_not(tokenizer_dirs: dict[str, Path], tokenizer: Tokenizer) -> None:
    row = {"prompt": "Question: 2 + 2?\nAnswer:", "completion": " It is 4."}
    headers = Tokenizer.open(tokenizer_dirs["headers"])
    assert full_texts(CompletionDataset("x"), headers, row) == [
        "<|begin|>Question: 2 + 2?\nAnswer: It is 4.<|end_of_text|>"
    ]
    (document,) = encode_documents(CompletionDataset("x"), headers, row)
    assert headers.decode(document.tokens[document.loss_mask].tolist(), special=True) == " It is 4.<|end_of_text|>"
    assert document.tokens[1:-1].tolist() == headers.encode(row["prompt"] + row["completion"]), "tokenized as one text"
    assert target_texts(CompletionDataset("x", train_on="all"), headers, row) == [
        row["prompt"] + " It is 4.<|end_of_text|>"
    ]
    assert target_texts(CompletionDataset("x", eos_token="<|endoftext|>"), tokenizer, row) == [" It is 4.<|endoftext|>"]
    lists = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    assert target_texts(CompletionDataset("x"), tokenizer, lists) == ["Hello there 😀<|im_end|>"]
    assert full_texts(CompletionDataset("x"), tokenizer, lists) == [tokenizer.render(CONVERSATION)]
    for mixed in (
        {"prompt": QUESTION["content"], "completion": [ANSWER]},
        {"prompt": [QUESTION], "completion": ANSWER["content"]},
    ):
        assert full_texts(CompletionDataset("x"), tokenizer, mixed) == [tokenizer.render([QUESTION, ANSWER])]
    assert reject_reason(CompletionDataset("x"), tokenizer, {"prompt": 3, "completion": "a"}).startswith("prompt:")


@pytest.mark.parametrize(
    ("prompt", "completion", "is_merged"),
    [
        ("Question: wha", "t is it", True),
        ("Question:", " what is it", False),
        ("Question: ", "what is it", False),
        ("Question:", "", False),
    ],
)
def test_first_token_that_covers_the_prompt_is_flagged(
    prompt: str, completion: str, is_merged: bool, tokenizer: Tokenizer
) -> None:
    row = {"prompt": prompt, "completion": completion}
    (document,) = encode_documents(CompletionDataset("x"), tokenizer, row)
    assert bool(document.doc_flags & DocFlags.FIRST_TOKEN_MERGED) == is_merged


def test_text_targets_are_all_tokens_between_bos_and_eos(tokenizer_dirs: dict[str, Path], tokenizer: Tokenizer) -> None:
    row = {"text": "Hello there. 😀"}
    headers = Tokenizer.open(tokenizer_dirs["headers"])
    assert full_texts(TextDataset("x"), headers, row) == ["<|begin|>Hello there. 😀<|end_of_text|>"]
    assert target_texts(TextDataset("x"), headers, row) == ["Hello there. 😀<|end_of_text|>"]
    assert full_texts(TextDataset("x", eos_token="<|endoftext|>"), tokenizer, row) == ["Hello there. 😀<|endoftext|>"]
    assert full_texts(TextDataset("x"), tokenizer, {"text": "Hello.<|im_end|>"}) == ["Hello.<|im_end|>"], (
        "one end token"
    )
    with pytest.raises(UserError, match="'<end>'"):
        TextDataset("x", eos_token="<end>").prepare_tokenizer(tokenizer)
    tokenizer.eos = None
    with pytest.raises(UserError, match="eos_token"):
        TextDataset("x").prepare_tokenizer(tokenizer)


@pytest.mark.parametrize("length", [2, 3, 4, 7, 100])
def test_every_token_of_a_long_text_is_target_once(length: int, tokenizer: Tokenizer) -> None:
    rows = {"text": "Hello there. Thanks"}, {"text": "Hello"}
    for dataset_class in (TextDataset, AutoDataset):
        windows = [*encode_documents(dataset_class("x", max_length=length), tokenizer, *rows)]
        assert all(
            len(document.tokens) <= length and document.full_length == len(document.tokens) for document in windows
        )
        targets = [token for document in windows for token in document.tokens[1:].tolist()]
        texts = [tokenizer.encode(row["text"]) + [tokenizer.eos] for row in rows]
        assert targets == [token for text in texts for token in text[1:]]
    truncated = [
        *encode_documents(TextDataset("x", max_length=length, excess_length_strategy="truncate"), tokenizer, *rows)
    ]
    assert [part.tokens.tolist() for part in truncated] == [text[:length] for text in texts]
    assert [part.full_length for part in truncated] == [len(text) for text in texts]


def test_truncated_row_does_not_end_with_eos(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(tokenizer.render(CONVERSATION))
    rows = ChatDataset("x", max_length=len(token_ids) - 4)
    truncated, complete = encode_documents(rows, tokenizer, {"messages": CONVERSATION}, {"messages": CONVERSATION[:2]})
    assert truncated.tokens.tolist() == token_ids[:-4] and truncated.full_length == len(token_ids)
    assert truncated.loss_mask[-1] and truncated.tokens[-1] != tokenizer.eos
    assert complete.full_length == len(complete.tokens)


def test_long_rows_are_dropped_or_split(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(tokenizer.render(CONVERSATION))
    assert [
        *encode_documents(
            ChatDataset("x", max_length=len(token_ids) - 1, excess_length_strategy="drop"),
            tokenizer,
            {"messages": CONVERSATION},
        )
    ] == []
    (document,) = encode_documents(
        ChatDataset("x", max_length=len(token_ids), excess_length_strategy="drop"),
        tokenizer,
        {"messages": CONVERSATION},
    )
    assert document.tokens.tolist() == token_ids
    windows = [
        *encode_documents(
            ChatDataset("x", max_length=len(token_ids) // 2, excess_length_strategy="split"),
            tokenizer,
            {"messages": CONVERSATION},
        )
    ]
    assert len(windows) > 1
    targets = [token for window in windows for token in window.tokens[1:][window.loss_mask[1:]].tolist()]
    assert tokenizer.decode(targets, special=True) == BOTH


def test_format_is_detected_from_columns(tokenizer: Tokenizer) -> None:
    rows = {
        "OpenAI messages (column 'messages')": ({"messages": CONVERSATION, "text": "a"}, ChatDataset("x")),
        "OpenAI messages (column 'conversation')": (
            {"conversation": CONVERSATION},
            ChatDataset("x", columns={"messages": "conversation"}),
        ),
        "ShareGPT (column 'conversations')": (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ShareGPTDataset("x"),
        ),
        "Alpaca (columns 'instruction', 'output')": ({"instruction": "a", "output": "b"}, InstructDataset("x")),
        "prompts with completions (columns 'prompt', 'completion')": (
            {"prompt": "a", "completion": "b", "label": None},
            CompletionDataset("x"),
        ),
        "plain text (column 'text')": ({"text": "a", "messages": None, "prompt": None}, TextDataset("x")),
    }
    for description, (row, dataset) in rows.items():
        assert AutoDataset("x").describe(row) == description
        assert target_texts(AutoDataset("x"), tokenizer, row) == target_texts(dataset, tokenizer, row)
    detected = AutoDataset("x", train_on="last", max_length=1000, chat_template="a.jinja")
    (chat,) = (detected.detect({"messages": CONVERSATION}),)
    assert chat == ChatDataset("x", train_on="last", max_length=1000, chat_template="a.jinja")


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"foo": 1, "bar": "a", "none": None}, ["foo (a number)", "bar (a string)"]),
        ({}, ["kind"]),
        ({"text": 3}, ["text: ", "a number"]),
        ({"chosen": "a", "rejected": "b"}, ["'chosen', 'rejected'"]),
        ({"prompt": "a", "completion": "b", "label": True}, ["'prompt', 'completion', 'label'"]),
        ({"messages": []}, ["messages: "]),
    ],
)
def test_unknown_columns_are_rejected_by_name(fields: dict, values: list[str], tokenizer: Tokenizer) -> None:
    reason = reject_reason(AutoDataset("x"), tokenizer, fields)
    assert all(value in reason for value in values)


def test_preference_pair_is_two_documents_with_one_prompt(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs["headers"])
    better, worse = {"role": "assistant", "content": "Four."}, {"role": "assistant", "content": "Five."}
    ends = ["Four.<|eot_id|>", "Five.<|eot_id|>"]
    for row in (
        {"chosen": [QUESTION, better], "rejected": [QUESTION, worse]},
        {"chosen": [QUESTION, better], "rejected": [QUESTION, worse], "prompt": QUESTION["content"]},
        {"chosen": [QUESTION, better], "rejected": [QUESTION, worse], "prompt": [QUESTION]},
        {"chosen": [better], "rejected": [worse], "prompt": [QUESTION]},
        {"chosen": [better], "rejected": [worse], "prompt": QUESTION["content"]},
        {"chosen": "Four.", "rejected": "Five.", "prompt": [QUESTION]},
    ):
        assert target_texts(PreferenceDataset("x"), tokenizer, row) == ends
        assert full_texts(PreferenceDataset("x"), tokenizer, row) == [
            tokenizer.render([QUESTION, side]) for side in (better, worse)
        ]
    earlier = {"chosen": [*CONVERSATION[:3], better], "rejected": [*CONVERSATION[:3], worse]}
    assert target_texts(PreferenceDataset("x"), tokenizer, earlier) == ends, "a shared prefix is no preference"


def test_preferences_can_be_texts(tokenizer: Tokenizer) -> None:
    explicit = {"prompt": "2 + 2 =", "chosen": " four", "rejected": " five"}
    assert target_texts(PreferenceDataset("x"), tokenizer, explicit) == [" four<|im_end|>", " five<|im_end|>"]
    implicit = {"chosen": "2 + 2 = four", "rejected": "2 + 2 = five"}
    assert target_texts(PreferenceDataset("x"), tokenizer, implicit) == [" four<|im_end|>", " five<|im_end|>"]
    assert full_texts(PreferenceDataset("x"), tokenizer, implicit) == full_texts(
        PreferenceDataset("x"), tokenizer, explicit
    )
    assert [
        *encode_documents(PreferenceDataset("x", excess_length_strategy="drop", max_length=3), tokenizer, explicit)
    ] == [], "both documents of a pair or none"
    both = {**explicit, **implicit}
    assert target_texts(PreferenceDataset("x"), tokenizer, both) == [" four<|im_end|>", " five<|im_end|>"], (
        "the prompt is not repeated"
    )
    assert full_texts(PreferenceDataset("x"), tokenizer, both) == full_texts(
        PreferenceDataset("x"), tokenizer, explicit
    )


@pytest.mark.parametrize("key", ["prompt", "margin"])
def test_optional_column_that_is_set_is_required(key: str, tokenizer: Tokenizer) -> None:
    dataset, row = PreferenceDataset("x", columns={key: "extra"}), {"chosen": "a b", "rejected": "a c"}
    assert "'extra'" in reject_reason(dataset, tokenizer, row) and key in reject_reason(dataset, tokenizer, row)
    assert len(list(encode_documents(dataset, tokenizer, {**row, "extra": None}))) == 2


@pytest.mark.parametrize(
    ("fields", "is_unused"),
    [
        ({"question": "2 + 2?", "chosen": "four", "rejected": "five"}, True),
        ({"question": "2 + 2?", "chosen": "four", "rejected": "five", "prompt": "2 + 2?"}, False),
        ({"question": "2 + 2?", "chosen": "2 + 2? four", "rejected": "2 + 2? five"}, False),
        ({"question": "", "chosen": "four", "rejected": "five"}, False),
        ({"chosen": "four", "rejected": "five"}, False),
        ({"question": "2 + 2?", "chosen": [ANSWER], "rejected": [CONVERSATION[3]]}, True),
        (
            {"question": QUESTION["content"], "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, CONVERSATION[3]]},
            False,
        ),
    ],
)
def test_unused_prompt_of_a_pair_is_reported(fields: dict, is_unused: bool, tokenizer: Tokenizer) -> None:
    dataset, usage = PreferenceDataset("x"), ColumnUsage()
    dataset.encode_rows(dataset.prepare_tokenizer(tokenizer), [Row("rows.jsonl:1", fields)], usage)
    assert [report.name for report in usage.reports if report.usage == "context"] == ["question"] * is_unused
    assert ("'prompt'" in dataset.describe(fields)) == ("prompt" in fields)


def test_repeated_prompt_of_a_pair_is_written_once(tokenizer: Tokenizer) -> None:
    """Some datasets have it in the prompt, after a system message, and at the start of both answers too."""
    system, better, worse = {"role": "system", "content": "Be brief."}, ANSWER, {**ANSWER, "content": "It is 5."}
    explicit = {"prompt": [system, QUESTION], "chosen": [better], "rejected": [worse]}
    repeated = {"prompt": [system, QUESTION], "chosen": [QUESTION, better], "rejected": [QUESTION, worse]}
    assert full_texts(PreferenceDataset("x"), tokenizer, repeated) == full_texts(
        PreferenceDataset("x"), tokenizer, explicit
    )
    assert target_texts(PreferenceDataset("x"), tokenizer, repeated) == target_texts(
        PreferenceDataset("x"), tokenizer, explicit
    )


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"chosen": "a", "rejected": "a"}, ["chosen", "rejected"]),
        ({"chosen": [QUESTION, ANSWER]}, ["'rejected'"]),
        ({"chosen": [QUESTION], "rejected": [QUESTION, ANSWER]}, ["assistant"]),
        ({"prompt": "a", "chosen": "b", "rejected": None}, ["rejected: ", "null", "on_bad_row"]),
        ({"prompt": [QUESTION], "chosen": [], "rejected": [ANSWER]}, ["chosen: "]),
        ({"chosen": 3, "rejected": "a"}, ["chosen: ", "number"]),
        ({"chosen": [QUESTION, 3], "rejected": [QUESTION, ANSWER]}, ["chosen[1]: "]),
    ],
)
def test_invalid_preferences_name_column_and_value(fields: dict, values: list[str], tokenizer: Tokenizer) -> None:
    reason = reject_reason(PreferenceDataset("x"), tokenizer, fields)
    assert all(value in reason for value in values)


@pytest.mark.parametrize(
    ("dataset", "fields", "suggestion"),
    [
        (PreferenceDataset("x"), {"prompt": "a", "completion": "b", "label": True}, "`kind: unpaired_preference`"),
        (UnpairedPreferenceDataset("x"), {"prompt": "a", "chosen": "b", "rejected": "c"}, "`kind: preference`"),
        (ChatDataset("x"), {"prompt": "a", "completion": "b", "label": True}, "`kind: completion`"),
        (InstructDataset("x"), {"messages": CONVERSATION}, "`kind: chat`"),
        (ChatDataset("x"), {"text": "a"}, "`columns.messages`, or `kind: text`"),
        (ChatDataset("x"), {"talk": CONVERSATION}, "Set `columns.messages`."),
    ],
)
def test_rows_of_another_kind_are_named(
    dataset: DatasetConfig, fields: dict, suggestion: str, tokenizer: Tokenizer
) -> None:
    assert suggestion in reject_reason(dataset, tokenizer, fields)


def test_rows_in_memory_are_no_source() -> None:
    for source in ("", [{"text": "a"}]):
        with pytest.raises(FieldError, match="source"):
            TextDataset(source)  # pyright: ignore[reportArgumentType]


def test_label_of_unpaired_row_sets_flag(tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": [QUESTION], "completion": [ANSWER], "label": True},
        {"prompt": "2 + 2 =", "completion": " four", "label": False},
    ]
    assert target_texts(UnpairedPreferenceDataset("x"), tokenizer, *rows) == ["It is 4.<|im_end|>", " four<|im_end|>"]
    assert [document.doc_flags for document in encode_documents(UnpairedPreferenceDataset("x"), tokenizer, *rows)] == [
        DocFlags.DESIRABLE,
        DocFlags.UNDESIRABLE,
    ]
    assert reject_reason(UnpairedPreferenceDataset("x"), tokenizer, {**rows[0], "label": 1}).startswith("label: ")


BAD = [
    ({"chat": []}, ["'messages'", "chat"]),
    ({"messages": CONVERSATION[:1]}, ["assistant"]),
    ({"messages": CONVERSATION, "tools": "["}, ["tools: ", "JSON"]),
    ({"messages": [QUESTION, {"role": "assistant", "content": "\ud800"}]}, ["U+D800"]),
    ({"messages": [{"role": "user", "content": "what " * 300}, ANSWER]}, ["first 64 of"]),
]


@pytest.mark.parametrize(("row", "values"), BAD)
def test_bad_row_does_not_affect_other_rows(row: dict, values: list[str], tokenizer: Tokenizer) -> None:
    good = Row("a:1", {"messages": CONVERSATION})
    results = ChatDataset("x", max_length=64).encode_rows(
        tokenizer, [good, Row("a:2", row), good, BadRow("a:4", "no JSON")]
    )
    bad = results[1]
    assert isinstance(bad, BadRow) and bad.where == "a:2" and all(value in bad.reason for value in values)
    assert "\n" not in bad.reason
    assert results[3] == BadRow("a:4", "no JSON")
    first, third = results[0], results[2]
    assert isinstance(first, list) and isinstance(third, list)
    assert first[0].tokens.tolist() == third[0].tokens.tolist()


def test_invalid_text_rows_are_rejected(tokenizer: Tokenizer) -> None:
    for row, value in [
        ({"texts": "a"}, "'text'"),
        ({"text": 3}, "text: "),
        ({"text": "a\udfff"}, "U+DFFF"),
        ({"text": ""}, "1 token"),
    ]:
        assert value in reject_reason(TextDataset("x"), tokenizer, row)


def test_error_of_the_template_rejects_the_row(tokenizer_dirs: dict[str, Path]) -> None:
    row = {"messages": [{"role": "system", "content": "Hi"}, *CONVERSATION]}
    assert "System role not supported" in reject_reason(ChatDataset("x"), Tokenizer.open(tokenizer_dirs["turns"]), row)


def test_missing_chat_template_is_an_error_before_any_row(tokenizer: Tokenizer) -> None:
    tokenizer.templates = {}
    with pytest.raises(UserError, match="chat_template"):
        ChatDataset("x").prepare_tokenizer(tokenizer)
    assert len([*encode_documents(AutoDataset("x"), tokenizer, {"text": "Hello there"})]) == 1
    assert "chat_template" in reject_reason(AutoDataset("x"), tokenizer, {"messages": CONVERSATION})


def test_chat_template_file_replaces_that_of_the_tokenizer(
    tokenizer_dirs: dict[str, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text(
        "{{ tools[0].name }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    dataset = ChatDataset("x", columns={"messages": "chat"}, chat_template=str(tmp_path / "own.jinja"))
    row = {"chat": CONVERSATION[:2], "tools": [{"name": "add"}]}
    expected = "add<|im_start|>What is 2 + 2?<|im_end|><|im_start|>It is 4.<|im_end|>"
    assert full_texts(dataset, tokenizer, row) == full_texts(
        AutoDataset("x", chat_template=dataset.chat_template), tokenizer, {**row, "messages": CONVERSATION[:2]}
    )
    assert full_texts(dataset, tokenizer, row) == [expected]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"source": ""}, "source"),
        ({"split": "train["}, "split"),
        ({"max_length": 1}, "max_length"),
        ({"max_samples": 0}, "max_samples"),
        ({"max_bad_row_fraction": 1.5}, "max_bad_row_fraction"),
        ({"num_proc": -1}, "num_proc"),
    ],
)
def test_invalid_option_is_rejected_by_name(fields: dict, field: str) -> None:
    for dataset_class in (AutoDataset, TextDataset):
        with pytest.raises(FieldError) as error:
            dataset_class(**{"source": "rows.jsonl", **fields})
        assert error.value.field == field
    with pytest.raises(FieldError, match="train_on"):
        ChatDataset("rows.jsonl", train_on=())


def test_preference_data_cannot_be_split_or_trained_on_prompts() -> None:
    for fields in ({"excess_length_strategy": "split"}, {"train_on": "all"}):
        for dataset_class in (PreferenceDataset, UnpairedPreferenceDataset):
            with pytest.raises(FieldError):
                dataset_class("x", **fields)


def test_fingerprint_ignores_options_of_the_loader() -> None:
    loader_options = {
        "max_samples": 3,
        "packing": True,
        "shuffle": False,
        "num_proc": 2,
        "on_bad_row": "skip",
        "streaming": True,
        "split": "a",
    }
    assert AutoDataset("x").fingerprint_keys() == AutoDataset("y", **loader_options).fingerprint_keys()
    for options in (
        {"max_length": 7},
        {"train_on": "last"},
        {"excess_length_strategy": "drop"},
        {"chat_template": "a"},
        {"eos_token": "a"},
    ):
        assert AutoDataset("x").fingerprint_keys() != AutoDataset("x", **options).fingerprint_keys()


def test_source_is_checked_without_reading_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff")
    ChatDataset(str(path)).check_source()
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        ChatDataset(str(tmp_path / "missing.jsonl")).check_source()
    with pytest.raises(UserError, match=r"missing\.jinja"):
        InstructDataset(str(path), chat_template="missing.jinja").check_source()
