"""Messages that contain the message of something else."""

import pytest

from tunekit.errors import UserError


@pytest.mark.parametrize(("text", "expected"), [
    ("bob.. Use another", "bob. Use another"), ("no reason given..", "no reason given."), ("loading... done", None),
    ("../a: no such file. Use ../b", None), ("cd .. and repeat", None), ("a/... is cut", None),
])  # fmt: skip
def test_quoted_messages_end_with_one_full_stop(text: str, expected: str | None) -> None:
    assert str(UserError(text)) == (expected or text)
