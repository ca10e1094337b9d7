"""No column is dropped in silence: each is read, ignored by name, or reported; contexts are never only a note."""

import json
from pathlib import Path
from typing import Any

import pytest

from tunekit.data.check_target import ColumnReaders
from tunekit.data.column_checks import column_findings
from tunekit.data.column_usage import ColumnUsage, iter_texts
from tunekit.data.dataloader.preference_data import AutoPreferenceDataset
from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.data.dataloader.reward_data import AutoRewardDataset
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
from tunekit.data.document import Document
from tunekit.data.embedding_datasets import (
    RerankingDataset,
    RerankingPairsDataset,
    RetrievalDataset,
    SimilarityDataset,
)
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.data.sft_datasets import AutoDataset, PretokenizedDataset, SegmentsDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Filter, RemoveColumns, RenameColumns, RowFields

USER, ASSISTANT = {"role": "user", "content": "What is the capital?"}, {"role": "assistant", "content": "It is Oslo."}
WRONG = {"role": "assistant", "content": "It is Bergen."}
CHAT = {"messages": [USER, ASSISTANT]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]}
TEXTS = {"prompt": "The capital is", "completion": " called Oslo."}
CONVERSATION = {"prompt": [USER], "completion": [ASSISTANT]}
PAIR = {"prompt": "The capital is", "chosen": " called Oslo.", "rejected": " called Bergen."}
STEPS = {"completions": ["It is a port.", "It is Oslo."], "labels": [True, True]}
ROWS: dict[str, tuple[type[DatasetConfig], dict[str, Any]]] = {
    "chat": (ChatDataset, CHAT),
    "sharegpt": (ShareGPTDataset, SHAREGPT),
    "instruct": (InstructDataset, {"instruction": "Name the capital.", "output": "It is Oslo."}),
    "completion": (CompletionDataset, TEXTS),
    "completion of messages": (CompletionDataset, CONVERSATION),
    "text": (TextDataset, {"text": "The capital is Oslo."}),
    "segments": (SegmentsDataset, {"segments": [{"text": "It is", "train": False}, {"text": " Oslo.", "train": True}]}),
    "pretokenized": (PretokenizedDataset, {"input_ids": [1, 5, 6, 7]}),
    "auto": (AutoDataset, TEXTS),
    "pairs": (PreferenceDataset, PAIR),
    "pairs of messages": (PreferenceDataset, {"chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]}),
    "pairs without a prompt": (AutoPreferenceDataset, {"chosen": "It is Oslo.", "rejected": "It is Bergen."}),
    "unpaired": (UnpairedPreferenceDataset, {**TEXTS, "label": True}),
    "unpaired of messages": (AutoPreferenceDataset, {**CONVERSATION, "label": True}),
    "labeled": (LabeledDataset, {"text": "It is Oslo.", "label": 1}),
    "labeled messages": (AutoRewardDataset, {**CHAT, "label": 1}),
    "stepwise": (StepwiseDataset, {"prompt": "The capital is", **STEPS}),
    "stepwise of messages": (StepwiseDataset, {"prompt": [USER], **STEPS}),
    "reranking": (RerankingDataset, {"query": "capital", "document": "It is Oslo.", "label": 1}),
    "reranking pairs": (RerankingPairsDataset, {"query": "capital", "positive": "Oslo", "negative": "Bergen"}),
    "retrieval": (RetrievalDataset, {"query": "capital", "positive": "Oslo"}),
    "similarity": (SimilarityDataset, {"sentence1": "Oslo", "sentence2": "Bergen", "score": 0.5}),
    "prompts": (PromptDataset, {"prompt": "What is the capital?"}),
    "prompts of messages": (PromptDataset, {"messages": [USER]}),
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up a city.", "parameters": {}}}
OTHER = [{"role": "user", "content": "Which river is longest?"}]
LONG = "The longest river is blue."
CONTEXTS: dict[str, Any] = {
    **dict.fromkeys(("tools", "functions", "available_tools"), [TOOL]),
    **dict.fromkeys(("messages", "conversation", "dialog", "history", "chat_history", "previousMessages"), OTHER),
    "conversations": [{"from": "human", "value": "Which river is longest?"}],
    **dict.fromkeys(("documents", "contexts", "retrieved_passages", "images", "choices"), [LONG]),
    "image": {"bytes": b"\x89PNG", "path": None},
    "chat_template_kwargs": {"thinking_style": "deep thoughts"},
    **dict.fromkeys(
        (
            "system", "system_prompt", "System Prompt", "systemMessage", "prompt", "user_prompt", "context",
            "sql_context", "document", "article", "passage", "question", "question_text", "instruction", "input",
            "query", "query_1", "problem", "premise", "background", "knowledge", "db_schema",
        ),
        LONG,
    ),
}  # fmt: skip


def encode(config: DatasetConfig, tokenizer: Tokenizer, *rows: dict[str, Any]) -> tuple[list[Any], ColumnUsage]:
    """Results of rows, and the usage of their columns."""
    usage, located = ColumnUsage(), [Row(f"rows.jsonl:{number}", row) for number, row in enumerate(rows, 1)]
    return config.encode_rows(config.prepare_tokenizer(tokenizer), located, usage), usage


def to_lists(documents: list[Document]) -> list[tuple[list[int], list[bool]]]:
    return [(document.tokens.tolist(), document.loss_mask.tolist()) for document in documents]


@pytest.mark.parametrize("name", ROWS)
def test_context_column_is_seen_reported_or_refused(name: str, nano: Tokenizer) -> None:
    cls, row = ROWS[name]
    silent = []
    for column, value in CONTEXTS.items():
        if column in row:
            continue
        fields = {**row, column: value}
        (result,), usage = encode(cls("rows.jsonl"), nano, fields)
        if isinstance(result, BadRow):
            continue
        seen = " ".join(nano.decode(document.tokens.tolist()) for document in result)
        reported = {report.name for report in usage.reports if report.usage == "context"}
        is_seen = all(text.strip() in seen for text in iter_texts(value)) and value != CONTEXTS["image"]
        silent += [column] if not is_seen and column not in reported else []
    assert not silent


@pytest.mark.parametrize("name", ROWS)
def test_ordinary_row_has_no_finding(name: str, nano: Tokenizer) -> None:
    cls, row = ROWS[name]
    metadata = {"id": "a1", "source": "web", "split": "train", "prompt_id": "x", "category": "city", "Meta": {"a": 1}}
    empty = {"context": None, "history": [], "note": ""}
    (result,), usage = encode(cls("rows.jsonl"), nano, {**row, **metadata, **empty})
    assert isinstance(result, list) and result and not usage.reports
    _, usage = encode(cls("rows.jsonl"), nano, {**row, "difficulty_notes": "hard"})
    assert [(report.usage, report.name) for report in usage.reports] == [("unread", "difficulty_notes")]


KEYS_OF_MESSAGES = {"images": ["a long name.png"], "context": LONG, "reasoning_details": [{"text": LONG}]}


@pytest.mark.parametrize("name", ["chat", "sharegpt", "completion of messages", "pairs of messages"])
def test_unread_keys_of_messages_are_reported(name: str, nano: Tokenizer) -> None:
    cls, row = ROWS[name]
    column = next(key for key, value in row.items() if isinstance(value, list))
    first, *rest = row[column]
    for key, value in KEYS_OF_MESSAGES.items():
        usage_of_key = "unread" if key == "reasoning_details" else "context"
        _, usage = encode(cls("rows.jsonl"), nano, {**row, column: [{**first, key: value}, *rest]})
        assert [(report.usage, report.name) for report in usage.reports] == [(usage_of_key, f"{column}[].{key}")]
        (finding,) = column_findings("data", usage.reports, 1)
        assert finding.severity == ("note" if usage_of_key == "unread" else "wrong")
        assert "remove_columns" not in finding.hint  # which cannot remove it
    known = {"id": "a long id", "name": "a long name", "images": [], "context": None, "score": 0.5}
    assert not encode(cls("rows.jsonl"), nano, {**row, column: [{**first, **known}, *rest]})[1].reports


def test_keys_that_the_chat_template_writes_are_no_finding(nano: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "with_context.jinja"
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.context }}{{ m.content }}<|turn|>{% endfor %}")
    row = {"messages": [{**USER, "context": LONG}, ASSISTANT]}
    (result,), usage = encode(ChatDataset("rows.jsonl", chat_template=str(template), train_on="all"), nano, row)
    assert isinstance(result, list) and not usage.reports


@pytest.mark.parametrize("answers", [("It is Oslo.", "It is Bergen."), ([ASSISTANT], [WRONG])])
@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": [USER]},
        {"messages": json.dumps([USER])},
        {"conversations": [{"from": "human", "value": USER["content"]}]},
        {"conversation": [USER, ASSISTANT]},
    ],
)
def test_messages_are_the_prompt_of_a_pair(prompt: dict[str, Any], answers: tuple[Any, Any], nano: Tokenizer) -> None:
    """The same documents as with a list in the column `prompt`."""
    expected = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [WRONG]}
    row = {**prompt, "chosen": answers[0], "rejected": answers[1]}
    results, usage = encode(PreferenceDataset("rows.jsonl"), nano, row, expected)
    assert to_lists(results[0]) == to_lists(results[1]) and not usage.reports


def test_messages_that_end_with_another_answer_are_refused(nano: Tokenizer) -> None:
    row = {"messages": [USER, {**ASSISTANT, "content": "It is Rome."}], "chosen": "It is Oslo.", "rejected": "Bergen"}
    (result,), _ = encode(PreferenceDataset("rows.jsonl"), nano, row)
    assert isinstance(result, BadRow) and result.reason.startswith("messages: ")


@pytest.mark.parametrize(
    "name", ["chat", "sharegpt", "completion of messages", "pairs of messages", "labeled messages"]
)
def test_column_system_is_the_system_message(name: str, nano: Tokenizer) -> None:
    cls, row = ROWS[name]
    first = next(key for key, value in row.items() if isinstance(value, list))
    message = {"from": "system", "value": LONG} if name == "sharegpt" else {"role": "system", "content": LONG}
    expected = {**row, **{key: [message, *row[key]] for key in (first, "rejected") if key in row}}
    results, _ = encode(cls("rows.jsonl"), nano, {**row, "system": LONG}, expected, {**expected, "system": LONG})
    assert to_lists(results[0]) == to_lists(results[1]) == to_lists(results[2])
    (result,), _ = encode(cls("rows.jsonl"), nano, {**expected, "system": "Be brief."})
    assert isinstance(result, BadRow)


def test_repeated_text_and_explicit_choices_count_as_used(nano: Tokenizer) -> None:
    row = {"question": "Which river is longest?", "answer": " The blue one.", "language": "en"}
    rename = RenameColumns({"question": "prompt", "answer": "completion"})
    for transforms, extra in (
        (
            (rename,),
            {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "?"}]},
        ),
        ((rename, Filter({"context": "a plain"})), {"context": "a plain"}),
        ((rename, RemoveColumns(("context", "notes"))), {"context": "a plain"}),
    ):
        _, usage = encode(CompletionDataset("rows.jsonl", transforms=transforms), nano, {**row, **extra})
        assert not [report for report in usage.reports if report.usage == "context"]


def test_only_columns_that_rewards_do_not_read_are_reported() -> None:
    usage = ColumnUsage()
    usage.add("rows.jsonl:1", RowFields({"context": LONG, "answer": "4", "hardness": "low"}), lambda: "")
    for readers, expected in (
        (ColumnReaders(), ["wrong", "note"]),
        (ColumnReaders(frozenset(("answer", "context"))), ["note"]),
        (ColumnReaders(frozenset(), True), ["doubtful"]),
        (ColumnReaders(frozenset(("context",)), True), []),
    ):
        assert [finding.severity for finding in column_findings("data", usage.reports, 1, readers)] == expected


MESSAGE = json.dumps(ASSISTANT)
SERIALIZED = (
    json.dumps({"messages": [USER, ASSISTANT], "tools": []}),
    json.dumps({"choices": [{"message": ASSISTANT}]}),
    str([USER, ASSISTANT]),
    json.dumps([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]),
    json.dumps([{"type": "text", "text": "Hi"}]),
)
PLAIN = (
    '{"a": 1}', '{"name": "Ada", "role": "engineer", "content": 3}', '["a", "b"]', '{"from": "Oslo", "value": 3}',
    "{x}", '[{"type": "object", "text": "Hi"}]', '{"role": "admin"}',
)  # fmt: skip


@pytest.mark.parametrize("name", ["text", "completion", "pairs", "instruct", "chat", "labeled", "retrieval"])
def test_serialized_messages_are_parsed_or_reported(name: str, nano: Tokenizer) -> None:
    cls, row = ROWS[name]
    column = {"chat": "messages", "instruct": "output", "pairs": "chosen", "retrieval": "positive"}.get(name)
    column = column or next(key for key in ("completion", "text") if key in row)
    for text in (*SERIALIZED, MESSAGE, *PLAIN):
        value = [USER, {**ASSISTANT, "content": text}] if name == "chat" else text
        (result,), usage = encode(cls("rows.jsonl"), nano, {**row, column: value})
        is_parsed = text == MESSAGE and name in ("completion", "pairs")
        is_reported = [report.usage for report in usage.reports] == ["serialized"]
        assert isinstance(result, list) and is_reported == (text not in PLAIN and not is_parsed), text
        assert (text in " ".join(nano.decode(document.tokens.tolist()) for document in result)) != is_parsed
