"""Tasks by name: those of the nano need nothing but the package, and their rows are none that it was trained on."""

import json
import sys
from itertools import islice
from typing import Any

import pytest

from tunekit import assets
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError
from tunekit.evaluation import bundled_tasks
from tunekit.evaluation.tasks import TaskSelection

NANO = assets.MODELS["tunekit/nano"]


def test_rows_are_the_same_each_time_and_none_comes_twice() -> None:
    tokenizer = Tokenizer.open(NANO)
    for task in bundled_tasks.TASKS:
        one, other = (bundled_tasks.task_documents(task, tokenizer, None) for _ in range(2))
        texts = [tuple(document.tokens.tolist()) for _, document in one]
        assert len(set(texts)) == bundled_tasks.ROWS
        assert texts == [tuple(document.tokens.tolist()) for _, document in other]
        assert [row for row, _ in one] == [row for row, _ in other]
        assert len(bundled_tasks.task_documents(task, tokenizer, 7)) == 7
        assert all(len(document.tokens) == document.whole for _, document in one)


def test_calls_are_none_that_were_trained_on() -> None:
    rows = map(json.loads, (assets.DATA["tunekit/tools"] / "train.jsonl").read_text().splitlines())
    learnt = {row["messages"][-1]["content"] for row in rows}
    asked = {turns[-1].answer for turns in islice(bundled_tasks.TASKS["nano/tools"](), 300)}
    assert len(asked) == 300
    assert not asked & learnt


def test_what_is_meant() -> None:
    assert TaskSelection(("nano",)).own == list(bundled_tasks.TASKS)
    assert TaskSelection(("arc_easy", "nano/tools")).own == ["nano/tools"]
    assert TaskSelection(("arc_easy", "nano/tools")).others == ["arc_easy"]
    TaskSelection(("nano", "nano/facts")).check()
    with pytest.raises(UserError, match="no task 'nano/fact'; did you mean 'nano/facts'?"):
        TaskSelection(("nano/fact",)).check()
    refused: list[dict[str, Any]] = [{"shots": -1}, {"limit": 0}, {"names": ("nano", "nano")}]
    for how in refused:
        with pytest.raises(FieldError):
            TaskSelection(**how)
    idle: list[dict[str, Any]] = [{"shots": 0}, {"chat": True}, {"include": "tasks"}]
    for how in idle:
        with pytest.raises(FieldError, match="is for tasks of lm-evaluation-harness, and `tasks` names none"):
            TaskSelection(("nano",), **how)


def test_the_harness_is_loaded_only_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "tunekit.evaluation.lm_eval_adapter", raising=False)
    TaskSelection(("nano",)).check()
    with pytest.raises(UserError, match="'arc_easy' is for lm-evaluation-harness, and lm_eval is not installed: pip"):
        TaskSelection(("arc_easy",)).check()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lm_eval.defaults", None)  # a module that old versions lack
    monkeypatch.delitem(sys.modules, "tunekit.evaluation.lm_eval_adapter", raising=False)
    with pytest.raises(UserError, match="lm_eval is older than what is needed: pip install 'tunekit.harness.'"):
        TaskSelection(("arc_easy",)).check()
