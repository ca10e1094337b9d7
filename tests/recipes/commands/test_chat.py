"""The loop of `tune chat` with a fake model whose answers depend on the conversation."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunekit import build
from tunekit.checkpoint import atomic
from tunekit.cli import main as cli
from tunekit.cli.commands import chat
from tunekit.errors import UserError


def fake_answer(messages: list[chat.Message]) -> Iterator[str]:
    """Answer with the number of messages. Stops or fails on request."""
    yield from (f"{len(messages)} ", messages[0]["role"], " ")
    if messages[-1]["content"] == "interrupt":
        raise KeyboardInterrupt
    if messages[-1]["content"] == "fail":
        raise UserError("too long")
    yield messages[-1]["content"]


def run_chat(
    lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str | None = None
) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    chat.chat_loop(fake_answer, system)
    return capsys.readouterr().out.splitlines()


def test_each_answer_sees_the_whole_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat("a\n\nb\n", monkeypatch, capsys) == ["1 user a", "3 user b"]


def test_reset_keeps_the_system_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for end in ("/quit", "/exit"):
        lines = f"a\n/reset\nb\n{end}\nc\n"
        assert run_chat(lines, monkeypatch, capsys, "Be kind.") == ["2 system a", "2 system b"]


def test_help_is_no_question(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat("/help\na\n", monkeypatch, capsys) == [chat.COMMANDS, "1 user a"]


def test_interrupted_answer_stays_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat("interrupt\nb\n", monkeypatch, capsys) == ["1 user ", "3 user b"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_error_ends_a_piped_conversation_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="too long"):
        run_chat("fail\nb\n", monkeypatch, capsys)
    monkeypatch.setattr("sys.stdin", Terminal("fail\nb\n"))
    chat.chat_loop(fake_answer)
    assert capsys.readouterr().out.rstrip("> ").splitlines()[-1].endswith("b")


def test_run_directory_resolves_to_its_final_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(UserError, match="not complete"):
        build.final_dir_of(tmp_path)
    with atomic.AtomicDir(tmp_path / "final"):
        pass
    assert build.final_dir_of(tmp_path) == tmp_path / "final"
    assert build.final_dir_of(tmp_path / "final") == tmp_path / "final"


@pytest.mark.parametrize(("args", "option"), [
    (["--temperature", "-1"], "--temperature"), (["--top-p", "0"], "--top-p"),
])  # fmt: skip
def test_invalid_sampling_options_are_one_line_errors(
    args: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", "tunekit/nano", *args]) == 2
    assert option in capsys.readouterr().err
