"""Redaction of secrets and of local paths."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from tunekit.hub import redact

HOME = Path.home()


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HF_TOKEN": "hf_never_show_me",
        "WANDB_API_KEY": "0123456789abcdef",
        "MLFLOW_TRACKING_PASSWORD": "correct horse",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "DB_PASSWD": "x",
        "TOKENIZERS_PARALLELISM": "honestly",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("text", "expected"), [
    ("push with hf_never_show_me", "push with ***"),
    ("0123456789abcdef correct horse wJalrXUtnFEMI", "*** *** ***"),
    ("hf_" + "a1B2" * 8, "***"),
    ("https://me:secret@mlflow.example.com/api", "https://mlflow.example.com/api"),
    ("https://example.com/?run=3&api_key=abc&access_token=d%20e", "https://example.com/?run=3&api_key=***&access_token=***"),
    ("parallel: honestly, an extra x", "parallel: honestly, an extra x"),
    (f"see {HOME}/secret/project/rows.jsonl, and {HOME}", f"see rows.jsonl, and {HOME.name}"),
    (f"sqlite:///{HOME}/mlruns.db", "sqlite:///mlruns.db"),
    ("lr 2e-4, https://huggingface.co/acme/tiny", "lr 2e-4, https://huggingface.co/acme/tiny"),
])  # fmt: skip
def test_redact_text(text: str, expected: str) -> None:
    assert redact.redact_text(text) == expected


def test_longer_secret_is_redacted_before_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdef")
    monkeypatch.setenv("B_TOKEN", "abcdefghij")
    assert redact.redact_text("abcdefghij abcdef") == "*** ***"


def test_redact_tree() -> None:
    tree = {
        "model": "/data/alice/models/llama",
        "rows": ["~/rows.jsonl", "rows.jsonl"],
        "lr": 0.1,
        "on": True,
        "no": None,
    }
    redacted = redact.redact_tree(tree | {"uri": "http://a:b@host"})
    assert redacted == {
        "model": "llama",
        "rows": ["rows.jsonl"] * 2,
        "lr": 0.1,
        "on": True,
        "no": None,
        "uri": "http://host",
    }
    assert redact.redact_path("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


def test_unreadable_token_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub raises NotADirectoryError or PermissionError for the token file."""
    (tmp_path / "file").touch()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "file" / "token"))
    assert redact.redact_text("0123456789abcdef and more") == "*** and more"
