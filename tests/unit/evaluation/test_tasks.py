"""Task selection by name, and the rows of the bundled tasks."""

import json
import sys
from typing import Any

import pytest

from tunekit import assets
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError
from tunekit.evaluation.tasks import TaskSelection, task_documents

NANO = assets.MODELS["tunekit/nano"]


def test_task_rows_are_reproducible_and_unique() -> None:
    tokenizer = Tokenizer.open(NANO)
    for task in assets.TASKS:
        first, second = (task_documents(task, tokenizer, None) for _ in range(2))
        texts = [tuple(document.tokens.tolist()) for _, document, _ in first]
        assert len(set(texts)) == 200
        assert texts == [tuple(document.tokens.tolist()) for _, document, _ in second]
        assert [row.where for row in first] == [row.where for row in second]
        assert len(task_documents(task, tokenizer, 7)) == 7
        assert all(len(document.tokens) == document.full_length for _, document, _ in first)


def test_test_calls_are_not_in_the_training_data() -> None:
    rows = map(json.loads, (assets.DATA["tunekit/tools"] / "train.jsonl").read_text().splitlines())
    train_calls = {row["messages"][-1]["content"] for row in rows}
    rows = map(json.loads, assets.TASKS["nano/tools"].read_text().splitlines())
    test_calls = {row["messages"][-1]["content"] for row in rows}
    assert len(test_calls) == 200
    assert not test_calls & train_calls


def test_task_selection() -> None:
    assert TaskSelection(("nano",)).bundled == list(assets.TASKS)
    assert TaskSelection(("arc_easy", "nano/tools")).bundled == ["nano/tools"]
    assert TaskSelection(("arc_easy", "nano/tools")).harness_tasks == ["arc_easy"]
    TaskSelection(("nano", "nano/facts")).check()
    with pytest.raises(UserError, match="^tasks: .*'nano/fact'.*'nano/facts'"):
        TaskSelection(("nano/fact",)).check()
    invalid: list[dict[str, Any]] = [{"num_fewshot": -1}, {"limit": 0}, {"names": ("nano", "nano")}]
    for options in invalid:
        with pytest.raises(FieldError):
            TaskSelection(**options)
    without_effect: list[dict[str, Any]] = [
        {"num_fewshot": 0},
        {"apply_chat_template": True},
        {"include_path": "tasks"},
    ]
    for options in without_effect:
        with pytest.raises(FieldError, match="lm-evaluation-harness"):
            TaskSelection(("nano",), **options)


def test_harness_is_imported_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "tunekit.evaluation.lm_eval_adapter", raising=False)
    TaskSelection(("nano",)).check()
    with pytest.raises(UserError, match="'arc_easy' .*lm_eval .*pip"):
        TaskSelection(("arc_easy",)).check()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lm_eval.defaults", None)  # a module that old versions lack
    monkeypatch.delitem(sys.modules, "tunekit.evaluation.lm_eval_adapter", raising=False)
    with pytest.raises(UserError, match="lm_eval .*pip install 'tunekit.harness.'"):
        TaskSelection(("arc_easy",)).check()
