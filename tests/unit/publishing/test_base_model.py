"""The base model and the license of a checkpoint."""

from pathlib import Path

import huggingface_hub
import pytest

from tests.helpers.random_checkpoints import make_checkpoint
from tunekit import assets
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.publishing.base_model import read_base_model, read_front_matter

COMMIT = "0123456789abcdef0123456789abcdef01234567"
APACHE = "\n                                 Apache License\n                           Version 2.0, January 2004\n"


@pytest.fixture
def cached_base(tmp_path: Path) -> Path:
    """Base model in the Hub cache."""
    return make_checkpoint(tmp_path / "hub/models--acme--tiny--llama/snapshots" / COMMIT, "llama2")


def test_base_in_the_hub_cache_has_repo_and_commit(cached_base: Path) -> None:
    for name in ("acme/tiny--llama", "acme/tiny--llama@main", str(cached_base)):
        base = read_base_model(HFCheckpoint.open(cached_base, name))
        assert (base.name, base.repo, base.commit) == ("acme/tiny--llama", "acme/tiny--llama", COMMIT)
        assert base.link == (
            f"[acme/tiny--llama](https://huggingface.co/acme/tiny--llama) at "
            f"[`0123456`](https://huggingface.co/acme/tiny--llama/tree/{COMMIT})"
        )


def test_local_base_is_named_by_its_directory(tmp_path: Path) -> None:
    base = read_base_model(HFCheckpoint.open(make_checkpoint(tmp_path / "secret" / "my-model", "llama2")))
    assert (base.name, base.repo, base.commit, base.link) == ("my-model", None, None, "`my-model`")
    nano = assets.model_dir("tunekit/nano")
    assert read_base_model(HFCheckpoint.open(nano, "tunekit/nano")).name == "tunekit/nano"


@pytest.mark.parametrize(("card", "expected"), [
    ("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n", {"license": "apache-2.0"}),
    ("---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
    ("---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE\n---\n",
     {"license": "other", "license_name": "tiny",
      "license_link": "https://huggingface.co/acme/tiny--llama/blob/main/LICENSE"}),
    ("---\nlicense: llama3.2\nlicense_link: https://example.com/l\n---\n",
     {"license": "llama3.2", "license_link": "https://example.com/l"}),
    ("# No front matter\nlicense: mit\n", {}),
    ("---\nlicense: [a\n---\n", {}),
    ("---\n- a list\n---\n", {}),
])  # fmt: skip
def test_license_is_read_from_the_card(cached_base: Path, card: str, expected: dict[str, str]) -> None:
    (cached_base / "README.md").write_bytes(card.encode())
    assert read_base_model(HFCheckpoint.open(cached_base)).license == expected


@pytest.mark.parametrize(("text", "expected"), [
    (APACHE, {"license": "apache-2.0"}),
    ("MIT License\n\nCopyright", {"license": "mit"}),
    ("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\n", {"license": "other", "license_link": "LICENSE.txt",
                                                 "license_name": "llama-3.2-community-license-agreement"}),
    ("", {"license": "other", "license_name": "see-file", "license_link": "LICENSE.txt"}),
])  # fmt: skip
def test_license_is_read_from_the_license_file(cached_base: Path, text: str, expected: dict[str, str]) -> None:
    (cached_base / "LICENSE.txt").write_text(text)
    assert read_base_model(HFCheckpoint.open(cached_base)).license == expected


def test_front_matter_matches_huggingface_hub(cached_base: Path) -> None:
    (cached_base / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n\n# Title\n---\nno: more\n---\n")
    theirs = huggingface_hub.ModelCard.load(cached_base / "README.md").data.to_dict()
    assert read_front_matter((cached_base / "README.md").read_text()) == theirs
