"""Messages of other libraries keep their reason, and lose hints that no command can follow."""

import time

import pytest

from tunekit.errors import UserError
from tunekit.hub import errors
from tunekit.hub.foreign_hints import drop_hints


@pytest.mark.parametrize(
    ("message", "reason", "dropped"),
    [
        ("File has size 5 (a.bin).\nThis is usual. Please retry with `force_download=True`.", "size 5", "force"),
        (
            "Config name is missing.\nPick one of: ['a', 'b']\nExample of usage:\n\t`load_dataset('x', 'a')`",
            "['a', 'b']",
            "load",
        ),
        ("Cannot access https://x/y?token=None&a=b (403). Pass token=<your_token>.", "?token=None&a=b (403).", "your"),
        ("x needs code. Please pass the argument `trust_remote_code=True` to allow it.", "x needs code.", "trust"),
        ("Checksums differ:\n['http://x']\nSet `verification_mode='no_checks'` to skip them", "['http://x']", "verif"),
        ("Private. Use use_auth_token or `huggingface-cli login`.", "Private.", "auth"),
        ("404, message='Not Found', url='http://127.0.0.1/x'", "message='Not Found'", "\n"),
        ("Pool(host='a', port=443): Max retries exceeded (Caused by Error('x'))", "port=443", "\n"),
        ("Install it with pip install s3fs.", "pip install s3fs", "\n"),
    ],
)
def test_reason_is_kept_and_hint_is_dropped(message: str, reason: str, dropped: str) -> None:
    line = drop_hints(OSError(message))
    assert reason in line and dropped not in line and "\n" not in line


def test_message_without_a_reason_is_its_type() -> None:
    assert drop_hints(OSError()) == drop_hints(OSError("Set `force_download=True`.")) == "OSError"


def test_incomplete_file_is_retried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)

    def download() -> None:
        raise OSError("Consistency check failed: size 5 (a.bin).\nPlease retry with `force_download=True`.")

    with pytest.raises(UserError) as error, errors.wrap_hub_errors("owner/model"):
        errors.retry_call(download, "owner/model")
    assert len(delays) == errors.MAX_ATTEMPTS - 1
    assert "owner/model" in str(error.value) and "force" not in str(error.value)
