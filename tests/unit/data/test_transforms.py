"""Row transforms rename columns and filter rows, from a config and from a user's file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tunekit.cli import main as cli
from tunekit.data.column_templates import RenderColumns
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Filter, RenameColumns, RowTransform
from tunekit.errors import FieldError, UserError


def test_rename_columns() -> None:
    fields = {"question": "a", "answer": "b", "prompt": "old", "id": 3}
    assert RenameColumns({"question": "prompt", "answer": "completion"})(fields) == {
        "prompt": "a",
        "completion": "b",
        "id": 3,
    }
    assert fields == {"question": "a", "answer": "b", "prompt": "old", "id": 3}
    assert RenameColumns({"a": "b", "b": "a"})({"a": 1, "b": 2}) == {"a": 2, "b": 1}
    with pytest.raises(UserError, match="'x'.*question"):
        RenameColumns({"x": "y"})({"question": "a"})
    with pytest.raises(FieldError):
        RenameColumns({"a": "c", "b": "c"})


def test_render_columns_keeps_the_text_as_it_is_written() -> None:
    template = "Q: {{ question }}{% if context %}\n{{ context }}{% endif %}\nA:\n"
    transform = RenderColumns({"prompt": template, "question": "{{ question | upper }}"})
    fields = {"question": "a", "context": None, "id": 3}
    assert transform(fields) == {"question": "A", "context": None, "id": 3, "prompt": "Q: a\nA:\n"}
    assert transform({"question": "a", "context": "b"})["prompt"] == "Q: a\nb\nA:\n"  # type: ignore[index]
    with pytest.raises(UserError, match="render_columns.prompt: the row has no column 'question'"):
        transform({"context": "b"})
    with pytest.raises(FieldError, match="invalid Jinja in line 2"):
        RenderColumns({"prompt": "a\n{% if %}"})
    with pytest.raises(UserError, match="sandbox"):
        RenderColumns({"prompt": "{{ text.__class__ }}"})({"text": "a"})


def test_columns_of_a_template_count_as_read() -> None:
    transform = RenderColumns({"prompt": "{{ context }} {{ question }}"})
    fields = AutoDataset("x", transforms=(transform,)).apply_transforms({"context": "c", "question": "q", "other": "o"})
    assert fields is not None and {"context", "question"} <= fields.reads and "other" not in fields.reads


@pytest.mark.parametrize(
    ("columns", "is_kept"),
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
def test_filter_keeps_rows_by_their_columns(columns: dict, is_kept: bool) -> None:
    fields = {"language": "en", "checked": True, "score": 1.0, "tags": ["a"]}
    assert Filter(columns)(fields) == (fields if is_kept else None)


def test_missing_filter_column_is_an_error() -> None:
    with pytest.raises(UserError, match="'x'.* a"):
        Filter({"x": 1})({"a": 1})


def test_transforms_run_before_the_format(tokenizer_dirs: dict[str, Path]) -> None:
    rows = [
        Row("a:1", {"q": "Hello", "a": " there", "ok": True}),
        Row("a:2", {"q": 3, "ok": False}),
        Row("a:3", {"q": "Hello", "ok": True}),
        BadRow("a:4", "no JSON"),
    ]
    dataset = AutoDataset("a", transforms=(Filter({"ok": True}), RenameColumns({"q": "prompt", "a": "completion"})))
    first, *results = dataset.encode_rows(Tokenizer.open(tokenizer_dirs["chatml"]), rows)
    assert isinstance(first, list) and len(first) == 1
    missing, dropped = results[1], results[0]
    assert dropped is None and isinstance(missing, BadRow) and missing.where == "a:3" and "'a'" in missing.reason
    assert results[2] == rows[3]


@dataclass(frozen=True)
class First(RowTransform):
    """Take the first message as text."""

    def __call__(self, fields: dict) -> dict:
        return {"text": fields["messages"][0] if "messages" in fields else sys.exit("no messages")}


def test_error_in_user_code_makes_a_bad_row(tokenizer_dirs: dict[str, Path]) -> None:
    rows = [Row("a:1", {"messages": []}), Row("a:2", {}), Row("a:3", {"messages": ["Hello there"]})]
    dataset = AutoDataset("a", transforms=(First(),))  # type: ignore[arg-type]
    empty, absent, documents = dataset.encode_rows(Tokenizer.open(tokenizer_dirs["chatml"]), rows)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if '["messages"][0]' in text)
    assert empty == BadRow("a:1", f"test_transforms.py:{line}: IndexError: list index out of range")
    assert absent == BadRow("a:2", f"test_transforms.py:{line}: SystemExit: no messages")
    assert isinstance(documents, list)
    with pytest.raises(AttributeError):  # not raised in user code
        AutoDataset("a").encode(None, rows[2:])  # type: ignore[arg-type]


USER_FILE = '''
from dataclasses import dataclass

from tunekit.data.chat_template.messages import Conversation, make_conversation
from tunekit.data.datasets import ConversationDataset
from tunekit.data.transforms import RowTransform
from tunekit.errors import UserError


@dataclass(frozen=True)
class Shout(RowTransform):
    """Write questions in capitals."""

    mark: str = "!"  # added to each question

    def __call__(self, fields):
        return {**fields, "question": fields["question"].upper() + self.mark} if fields["question"] else None


@dataclass(frozen=True)
class Forum(ConversationDataset):
    """Read threads of a question and an answer."""

    def to_conversation(self, fields):
        if "answer" not in fields:
            raise UserError("the thread has no answer")
        turns = [{"role": "user", "content": fields["question"]}, {"role": "assistant", "content": fields["answer"]}]
        return make_conversation(turns, "thread")
'''


@pytest.mark.slow
def test_user_transforms_and_formats_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(USER_FILE)
    rows = [{"question": f"{number} and 1?", "answer": f"{number + 1}"} for number in range(40)] + [{"question": ""}]
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
    import_args = ["--import", str(tmp_path / "own.py")]
    assert cli.main(["validate", str(tmp_path / "c.yaml"), *import_args]) == 0
    assert cli.main(["run", "sft", str(tmp_path / "c.yaml"), *import_args]) == 0
    assert "40 rows" in capsys.readouterr().err
    overrides = ["data.kind=chat", f"data.source={data['source']}", f"output_dir={tmp_path / 'other'}"]
    assert cli.main(["run", "sft", str(tmp_path / "c.yaml"), *overrides]) == 2
    assert "'messages'" in capsys.readouterr().err
