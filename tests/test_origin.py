"""What a checkpoint folder tells of where its weights come from, and under which licence."""

from pathlib import Path

import huggingface_hub
import pytest

from tests.checkpoints import made
from tunekit import assets
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.publishing.base_model import read_base_model, read_front_matter

COMMIT = "0123456789abcdef0123456789abcdef01234567"
APACHE = "\n                                 Apache License\n                           Version 2.0, January 2004\n"


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A base where the Hub's client keeps it."""
    return made(tmp_path / "hub/models--acme--tiny--llama/snapshots" / COMMIT, "llama2")


def test_a_base_in_the_cache_has_a_name_and_a_commit(cached: Path) -> None:
    for name in ("acme/tiny--llama", "acme/tiny--llama@main", str(cached)):
        found = read_base_model(HFCheckpoint.open(cached, name))
        assert (found.name, found.repo, found.commit) == ("acme/tiny--llama", "acme/tiny--llama", COMMIT)
        assert found.link == (
            f"[acme/tiny--llama](https://huggingface.co/acme/tiny--llama) at "
            f"[`0123456`](https://huggingface.co/acme/tiny--llama/tree/{COMMIT})"
        )


def test_a_folder_has_its_last_name_alone(tmp_path: Path) -> None:
    found = read_base_model(HFCheckpoint.open(made(tmp_path / "secret" / "my-model", "llama2")))
    assert (found.name, found.repo, found.commit, found.link) == ("my-model", None, None, "`my-model`")
    nano = assets.model_dir("tunekit/nano")
    assert read_base_model(HFCheckpoint.open(nano, "tunekit/nano")).name == "tunekit/nano"


@pytest.mark.parametrize(("card", "licence"), [
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
def test_the_licence_of_a_card(cached: Path, card: str, licence: dict[str, str]) -> None:
    (cached / "README.md").write_bytes(card.encode())
    assert read_base_model(HFCheckpoint.open(cached)).licence == licence


@pytest.mark.parametrize(("text", "licence"), [
    (APACHE, {"license": "apache-2.0"}),
    ("MIT License\n\nCopyright", {"license": "mit"}),
    ("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\n", {"license": "other", "license_link": "LICENSE.txt",
                                                 "license_name": "llama-3.2-community-license-agreement"}),
    ("", {"license": "other", "license_name": "see-file", "license_link": "LICENSE.txt"}),
])  # fmt: skip
def test_the_licence_of_a_text(cached: Path, text: str, licence: dict[str, str]) -> None:
    (cached / "LICENSE.txt").write_text(text)
    assert read_base_model(HFCheckpoint.open(cached)).licence == licence


def test_front_matter_is_what_the_hub_reads(cached: Path) -> None:
    (cached / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n\n# Title\n---\nno: more\n---\n")
    theirs = huggingface_hub.ModelCard.load(cached / "README.md").data.to_dict()
    assert read_front_matter((cached / "README.md").read_text()) == theirs
