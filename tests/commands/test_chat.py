"""The loop of `tune chat`, with a made-up model: what it says depends on all that was said before."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunekit import build
from tunekit.checkpoint import atomic
from tunekit.cli import main as cli
from tunekit.cli.commands import chat
from tunekit.errors import UserError


def answer(messages: list[chat.Message]) -> Iterator[str]:
    """Counts the messages; breaks off or fails when asked to."""
    yield from (f"{len(messages)} ", messages[0]["role"], " ")
    if messages[-1]["content"] == "interrupt":
        raise KeyboardInterrupt
    if messages[-1]["content"] == "fail":
        raise UserError("too long")
    yield messages[-1]["content"]


def said(
    lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str | None = None
) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    chat.talk(answer, system)
    return capsys.readouterr().out.splitlines()


def test_every_answer_knows_what_was_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said("a\n\nb\n", monkeypatch, capsys) == ["1 user a", "3 user b"]


def test_reset_keeps_the_system_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said("a\n/reset\nb\n/quit\nc\n", monkeypatch, capsys, "Be kind.") == ["2 system a", "2 system b"]


def test_a_stopped_answer_is_remembered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said("interrupt\nb\n", monkeypatch, capsys) == ["1 user ", "3 user b"]


def test_a_mistake_does_not_end_the_talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said("fail\nb\n", monkeypatch, capsys)[-1].endswith("b")


def test_a_run_is_where_its_final_checkpoint_is(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(UserError, match="has not ended"):
        build.final_dir_of(tmp_path)
    with atomic.AtomicDir(tmp_path / "final"):
        pass
    assert build.final_dir_of(tmp_path) == tmp_path / "final"
    assert build.final_dir_of(tmp_path / "final") == tmp_path / "final"


@pytest.mark.parametrize(("words", "says"), [
    (["--temperature", "-1"], "--temperature must not be below 0"), (["--top-p", "0"], "--top-p a share above 0"),
])  # fmt: skip
def test_wrong_numbers_are_told_in_a_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "tunekit/nano", *words]) == 2
    assert says in capsys.readouterr().err
