"""Columns renamed and rows chosen, by a config and by a person's own file."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tunekit.cli import main as cli
from tunekit.data.datasets import AutoDataset
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Filter, RenameColumns, RowTransform
from tunekit.errors import FieldError, UserError


def test_columns_get_other_names() -> None:
    fields = {"question": "a", "answer": "b", "prompt": "old", "id": 3}
    assert RenameColumns({"question": "prompt", "answer": "completion"})(fields) == {
        "prompt": "a",
        "completion": "b",
        "id": 3,
    }
    assert fields == {"question": "a", "answer": "b", "prompt": "old", "id": 3}
    assert RenameColumns({"a": "b", "b": "a"})({"a": 1, "b": 2}) == {"a": 2, "b": 1}
    with pytest.raises(UserError, match=r"the row has no column 'x' to rename \(it has: question\)"):
        RenameColumns({"x": "y"})({"question": "a"})
    with pytest.raises(FieldError, match="two columns get the same name"):
        RenameColumns({"a": "c", "b": "c"})


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({"language": "en"}, True),
        ({"language": "fr"}, False),
        ({"language": ("fr", "en")}, True),
        ({"language": ()}, False),
        ({"language": "en", "checked": True}, True),
        ({"language": "en", "checked": False}, False),
        ({"checked": 1}, False),
        ({"score": 1}, True),
        ({"score": True}, False),
        ({"tags": "a"}, False),
    ],
)
def test_rows_are_chosen_by_their_columns(columns: dict, kept: bool) -> None:
    fields = {"language": "en", "checked": True, "score": 1.0, "tags": ["a"]}
    assert Filter(columns)(fields) == (fields if kept else None)


def test_a_column_to_choose_by_must_be_there() -> None:
    with pytest.raises(UserError, match=r"the row has no column 'x' to choose by \(it has: a\)"):
        Filter({"x": 1})({"a": 1})


def test_transforms_come_before_anything_else(folders: dict[str, Path]) -> None:
    rows = [
        Row("a:1", {"q": "Hello", "a": " there", "ok": True}),
        Row("a:2", {"q": 3, "ok": False}),
        Row("a:3", {"q": "Hello", "ok": True}),
        BadRow("a:4", "no JSON"),
    ]
    choice = AutoDataset("a", transforms=(Filter({"ok": True}), RenameColumns({"q": "prompt", "a": "completion"})))
    first, *rest = choice.encode(Tokenizer.open(folders["chatml"]), rows)
    assert isinstance(first, list) and len(first) == 1
    assert rest == [None, BadRow("a:3", "the row has no column 'a' to rename (it has: q, ok)"), rows[3]]


@dataclass(frozen=True)
class First(RowTransform):
    """The first of some messages."""

    def __call__(self, fields: dict) -> dict:
        return {"text": fields["messages"][0]}


def test_a_mistake_in_a_persons_own_code_is_a_fault_of_the_row(folders: dict[str, Path]) -> None:
    rows = [Row("a:1", {"messages": []}), Row("a:2", {}), Row("a:3", {"messages": ["Hello there"]})]
    choice = AutoDataset("a", transforms=(First(),))  # type: ignore[arg-type]
    empty, absent, found = choice.encode(Tokenizer.open(folders["chatml"]), rows)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if '["messages"][0]' in text)
    assert empty == BadRow("a:1", f"test_transforms.py:{line}: IndexError: list index out of range")
    assert absent == BadRow("a:2", f"test_transforms.py:{line}: KeyError: 'messages'")
    assert isinstance(found, list)
    with pytest.raises(AttributeError):  # no code of a person
        AutoDataset("a").encode(None, rows[2:])  # type: ignore[arg-type]


OWN = '''
from dataclasses import dataclass

from tunekit.data.chat_template.messages import Conversation, make_conversation
from tunekit.data.datasets import ConversationDataset
from tunekit.data.transforms import RowTransform
from tunekit.errors import UserError


@dataclass(frozen=True)
class Shout(RowTransform):
    """Questions in capitals."""

    mark: str = "!"  # behind each

    def __call__(self, fields):
        return {**fields, "ask": fields["ask"].upper() + self.mark} if fields["ask"] else None


@dataclass(frozen=True)
class Forum(ConversationDataset):
    """Threads: who asks first, and what is answered."""

    def talk(self, fields):
        if "answer" not in fields:
            raise UserError("the thread has no answer")
        turns = [{"role": "user", "content": fields["ask"]}, {"role": "assistant", "content": fields["answer"]}]
        return make_conversation(turns, "thread")
'''


@pytest.mark.slow
def test_a_persons_own_transforms_and_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    rows = [{"ask": f"{number} and 1?", "answer": f"{number + 1}"} for number in range(40)] + [{"ask": ""}]
    (tmp_path / "threads.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"kind": "forum", "source": str(tmp_path / "threads.jsonl"), "num_proc": 1}
    data["transforms"] = [{"kind": "shout", "mark": "?!"}]
    config = {
        "model": "tunekit/nano",
        "data": data,
        "output_dir": str(tmp_path / "out"),
        "device": "cpu",
        "global_batch_size": 40,
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"recipe": "sft"}) + yaml.safe_dump(config))
    own = ["--import", str(tmp_path / "own.py")]
    assert cli.main(["validate", str(tmp_path / "c.yaml"), *own]) == 0
    assert cli.main(["run", "sft", str(tmp_path / "c.yaml"), *own]) == 0
    assert "40 rows" in capsys.readouterr().err
    other = ["data.kind=chat", f"data.source={data['source']}", f"output_dir={tmp_path / 'other'}"]
    assert cli.main(["run", "sft", str(tmp_path / "c.yaml"), *other]) == 2
    assert "the row has no column 'messages'" in capsys.readouterr().err
