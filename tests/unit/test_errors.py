"""Messages that contain the message of something else, and exceptions of code of the user."""

import pickle

import pytest

from tunekit.config.errors import ConfigError, FieldErrors
from tunekit.data.chat_template.turn_boundaries import AmbiguousMaskError
from tunekit.data.tokenizer import TextTooLongError
from tunekit.environments.tool_calls import run_in_thread
from tunekit.errors import FieldError, RunStopped, UserError, describe_exception


@pytest.mark.parametrize(("text", "expected"), [
    ("bob.. Use another", "bob. Use another"), ("no reason given..", "no reason given."), ("loading... done", None),
    ("../a: no such file. Use ../b", None), ("cd .. and repeat", None), ("a/... is cut", None),
])  # fmt: skip
def test_quoted_messages_end_with_one_full_stop(text: str, expected: str | None) -> None:
    assert str(UserError(text)) == (expected or text)


@pytest.mark.parametrize("error", [
    UserError("a"), RunStopped("a", 3), FieldError("lr", "must be > 0"), ConfigError(["c.yaml:1: a", "b"]),
    FieldErrors([FieldError("a", "b"), FieldError("c", "d")]), AmbiguousMaskError("a"), TextTooLongError("a"),
], ids=repr)  # fmt: skip
def test_errors_survive_the_way_to_another_process(error: Exception) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), repr(vars(copied))) == (type(error), str(error), repr(vars(error)))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunStopped("x", 1), GeneratorExit(), ValueError("x")], ids=repr)
def test_any_exception_in_a_thread_is_its_result(error: BaseException) -> None:
    def call() -> None:
        raise error

    assert run_in_thread(call).exception(timeout=60) is error


def test_description_of_an_exception_is_without_its_notes() -> None:
    error = ValueError("a\nb")
    error.add_note("a note")
    assert describe_exception(error) == "ValueError: a b"
    with pytest.raises(SyntaxError) as caught:
        compile("x = (", "mine.py", "exec")
    assert describe_exception(caught.value).startswith("SyntaxError: ")
