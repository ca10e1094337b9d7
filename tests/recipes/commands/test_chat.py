"""The loop of `tune chat` with a fake model whose answers depend on the conversation."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunekit import build
from tunekit.checkpoint import atomic
from tunekit.cli import main as cli
from tunekit.cli.commands import chat
from tunekit.errors import UserError


def fake_answer(messages: list[chat.Message], number: int, tokens: list[int]) -> Iterator[str]:
    """Answer with the number of messages and the roles of the first and the last. Stops or fails on request."""
    tokens.append(number)
    yield from (f"{len(messages)} ", f"{messages[0]['role']} ")
    if messages[-1]["content"] == "interrupt":
        raise KeyboardInterrupt
    if messages[-1]["content"] == "fail":
        raise UserError("too long")
    yield messages[-1]["content"]


def show_tokens(messages: list[chat.Message], tokens: list[int], suffix: str) -> bytes:
    return f"{len(messages)} {tokens}".encode()


def run_chat(
    lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str | None = None
) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    chat.chat_loop(fake_answer, chat.Chat(system), show_tokens)
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
    assert run_chat("/help\na\n", monkeypatch, capsys) == [*chat.HELP.splitlines(), "1 user a"]


def test_interrupted_answer_stays_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat("interrupt\nb\n", monkeypatch, capsys) == ["1 user ", "3 user b"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_saved_rows_have_the_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"a\n/save {tmp_path / 'rows.jsonl'}\n"))
    chat.chat_loop(fake_answer, chat.Chat(tools=tools), show_tokens)
    assert json.loads((tmp_path / "rows.jsonl").read_text())["tools"] == tools


def test_error_ends_a_piped_conversation_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="too long"):
        run_chat("fail\nb\n", monkeypatch, capsys)
    monkeypatch.setattr("sys.stdin", Terminal("fail\nb\n"))
    chat.chat_loop(fake_answer, chat.Chat(), show_tokens)
    assert capsys.readouterr().out.rstrip("> ").splitlines()[-1].endswith("b")


def test_commands_change_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "a\n/tool 7\n/system Be kind.\nb\n/system\nc\n"
    assert run_chat(lines, monkeypatch, capsys) == ["1 user a", "3 user 7", "2 system b", "1 user c"]


def test_several_lines_are_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = 'a\\\nb\n"""c\n\nd"""\n"""\ne\n"""\n"""f"""\n'
    expected = ["1 user a", "b", "3 user c", "", "d", "5 user e", "7 user f"]
    assert run_chat(lines, monkeypatch, capsys) == expected
    with pytest.raises(UserError, match="has no end"):
        run_chat('"""unfinished\n', monkeypatch, capsys)


def test_another_answer_replaces_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each answer has its own random numbers. Files contain the conversation up to the last answer."""
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.html"
    lines = f"a\nb\n/retry\n/save {rows}\n/tokens {page}\nc\n/save {rows}\n"
    written = [f"written to {file}" for file in (rows, page, rows)]
    assert run_chat(lines, monkeypatch, capsys) == [
        "1 user a", "3 user b", "3 user b", *written[:2], "5 user c", written[2],
    ]  # fmt: skip
    saved = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    assert [[message["content"] for message in row] for row in saved] == [
        ["a", "1 user a", "b", "3 user b"], ["a", "1 user a", "b", "3 user b", "c", "5 user c"],
    ]  # fmt: skip
    assert page.read_text() == "3 [2]", "the third answer to three messages"


@pytest.mark.parametrize(("line", "name"), [
    ("/foo", "/foo"), ("/save", "/save"), ("/save x.jsonl", "/save"), ("/tokens x", "/tokens"), ("/retry", "/retry"),
    ("/tool", "/tool"), ("/tool 7", "/tool"), ("a\n/save /nope/x", "/nope/x"),
])  # fmt: skip
def test_unusable_commands_are_errors(
    line: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        run_chat(f"{line}\n", monkeypatch, capsys)


def test_failed_retry_keeps_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    conversation = chat.Chat()
    conversation.send(fake_answer, {"role": "user", "content": "a"})
    before = list(conversation.messages)

    def fails(messages: list[chat.Message], number: int, tokens: list[int]) -> Iterator[str]:
        raise UserError("too long")

    with pytest.raises(UserError):
        conversation.retry(fails)
    assert conversation.messages == before


def test_tools_and_quantization_reach_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The text that a template prints for its tools is that of a system prompt without them."""
    template = tmp_path / "tools.jinja"
    template.write_text(
        "<|begin|><|user|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for tool in tools or [] %}{{ tool.name }}{% endfor %} {{ messages[-1].content }}<|turn|><|assistant|>"
    )
    (tmp_path / "tools.json").write_text('[{"name": "What is"}]')
    page = tmp_path / "page.html"

    def probabilities(*args: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"3 plus 4?\n/tokens {page}\n"))
        args = ("--temperature", "0", "--max-new-tokens", "12", "--chat-template", str(template), *args)
        assert cli.main(["chat", "tunekit/nano", *args]) == 0
        return page.read_text()

    with_tools = probabilities("--tools", str(tmp_path / "tools.json"))
    assert with_tools == probabilities("--system-prompt", "What is") != probabilities()
    assert probabilities("--quantization", "nf4") != probabilities()


def test_run_directory_resolves_to_its_final_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(UserError, match="not complete"):
        build.final_dir_of(tmp_path)
    with atomic.AtomicDir(tmp_path / "final"):
        pass
    assert build.final_dir_of(tmp_path) == tmp_path / "final"
    assert build.final_dir_of(tmp_path / "final") == tmp_path / "final"


@pytest.mark.parametrize(("args", "option"), [
    (["--temperature", "-1"], "--temperature"), (["--top-p", "0"], "--top-p"), (["--min-p", "2"], "--min-p"),
    (["--quantization", "nf5"], "--quantization"), (["--tools", "nope.json"], "--tools"),
    (["--config-overrides", "{rope: 1}"], "config_overrides.rope"), (["--stop-strings", ""], "--stop-strings"),
])  # fmt: skip
def test_invalid_sampling_options_are_one_line_errors(
    args: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", "tunekit/nano", *args]) == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_not_utf8_is_one_line(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9?\n"), "utf-8", errors))
    with pytest.raises(UserError, match="^standard input: "):
        chat.read_message()
