"""Tasks by name: those of the nano need nothing but the package, and their rows are none that it was trained on."""

import json
import sys
from itertools import islice
from typing import Any

import pytest

from tunekit import bundled
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError
from tunekit.evaluation import nano
from tunekit.evaluation.tasks import Tasks

NANO = bundled.MODELS["tunekit/nano"]


def test_rows_are_the_same_each_time_and_none_comes_twice() -> None:
    tokenizer = Tokenizer.open(NANO)
    for task in nano.TASKS:
        one, other = (nano.documents(task, tokenizer, None) for _ in range(2))
        texts = [tuple(document.tokens.tolist()) for _, document in one]
        assert len(set(texts)) == nano.ROWS
        assert texts == [tuple(document.tokens.tolist()) for _, document in other]
        assert [row for row, _ in one] == [row for row, _ in other]
        assert len(nano.documents(task, tokenizer, 7)) == 7
        assert all(len(document.tokens) == document.whole for _, document in one)


def test_calls_are_none_that_were_trained_on() -> None:
    rows = map(json.loads, (bundled.DATA["tunekit/tools"] / "train.jsonl").read_text().splitlines())
    learnt = {row["messages"][-1]["content"] for row in rows}
    asked = {turns[-1].answer for turns in islice(nano.TASKS["nano/tools"](), 300)}
    assert len(asked) == 300
    assert not asked & learnt


def test_what_is_meant() -> None:
    assert Tasks(("nano",)).own == list(nano.TASKS)
    assert Tasks(("arc_easy", "nano/tools")).own == ["nano/tools"]
    assert Tasks(("arc_easy", "nano/tools")).others == ["arc_easy"]
    Tasks(("nano", "nano/facts")).check()
    with pytest.raises(UserError, match="no task 'nano/fact'; did you mean 'nano/facts'?"):
        Tasks(("nano/fact",)).check()
    refused: list[dict[str, Any]] = [{"shots": -1}, {"limit": 0}, {"names": ("nano", "nano")}]
    for how in refused:
        with pytest.raises(FieldError):
            Tasks(**how)
    idle: list[dict[str, Any]] = [{"shots": 0}, {"chat": True}, {"include": "tasks"}]
    for how in idle:
        with pytest.raises(FieldError, match="is for tasks of lm-evaluation-harness, and `tasks` names none"):
            Tasks(("nano",), **how)


def test_the_harness_is_loaded_only_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "tunekit.evaluation.harness", raising=False)
    Tasks(("nano",)).check()
    with pytest.raises(UserError, match="'arc_easy' is for lm-evaluation-harness, and lm_eval is not installed: pip"):
        Tasks(("arc_easy",)).check()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lm_eval.defaults", None)  # a module that old versions lack
    monkeypatch.delitem(sys.modules, "tunekit.evaluation.harness", raising=False)
    with pytest.raises(UserError, match="lm_eval is older than what is needed: pip install 'tunekit.harness.'"):
        Tasks(("arc_easy",)).check()
